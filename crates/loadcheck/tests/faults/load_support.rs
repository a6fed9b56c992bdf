//! What the tests of disturbed loads share: a small checkpoint whose hashes are known, the command
//! that loads and verifies it, how to tell whether it ended as it must, and a library that goes
//! before the C library.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;
use std::time::{Duration, SystemTime};

use crate::support::{loadcheck, output_within, repository, stderr, stdout};
use onelayer_testing::skipped;
use onelayer_testing::{TestTensor, small_decoder, write_sharded};

/// Every way of reading, as the program names it.
pub(crate) const SOURCES: [&str; 5] = ["auto", "buffered", "mmap", "direct", "uring"];
/// How long a load may take that somebody disturbs.
const PATIENCE: Duration = Duration::from_secs(60);

/// A checkpoint, and what its tensors are.
pub(crate) struct World {
    directory: tempfile::TempDir,
    /// The folder of the checkpoint, without links.
    pub(crate) model: PathBuf,
    hashes: BTreeMap<String, String>,
}

/// How a load ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum End {
    /// Every byte was delivered and is right.
    Delivered,
    /// With an error that says what and where.
    Told,
    /// As SIGINT or SIGTERM ask for it.
    Interrupted,
    /// Killed by SIGKILL.
    Killed,
}

impl World {
    /// Three layers and what belongs to them, in two files.
    pub(crate) fn new() -> Self {
        Self::of(&small_decoder(3, 20_000))
    }

    /// A checkpoint of these files.
    pub(crate) fn of(shards: &[Vec<TestTensor>]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let model = directory.path().canonicalize().unwrap().join("model");
        fs::create_dir(&model).unwrap();
        write_sharded(&model, shards);
        let hash = |tensor: &TestTensor| (tensor.name.clone(), blake3::hash(&tensor.bytes).to_string());
        Self { directory, model, hashes: shards.iter().flatten().map(hash).collect() }
    }

    /// A path beside the checkpoint.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.model.parent().unwrap().join(name)
    }

    /// A folder to run in, empty but for one for temporary files.
    pub(crate) fn place(&self, name: &str) -> PathBuf {
        let place = self.path(name);
        fs::create_dir_all(place.join("tmp")).unwrap();
        place
    }

    /// The command that loads all of it in that way, compares it with the files, and prints the
    /// hashes.
    pub(crate) fn load(&self, io: &str, place: &Path) -> Command {
        Self::load_of(&self.model, io, place)
    }

    /// The same for the checkpoint in another folder.
    pub(crate) fn load_of(model: impl AsRef<OsStr>, io: &str, place: &Path) -> Command {
        let mut command = loadcheck(place);
        command.env("TMPDIR", place.join("tmp")).arg("run").arg(model);
        command.args(["--io", io, "--device", "host", "--budget", "8MiB"]);
        command.args(["--verify", "--hash", "--json", "-q"]);
        command
    }

    /// How a load ended, or what is wrong with that.
    pub(crate) fn judge(&self, output: &Output) -> Result<End, String> {
        let (text, code) = (stderr(output), output.status.code());
        if text.contains("panicked") {
            return Err(format!("a panic: {text}"));
        }
        let report: serde_json::Value = match code {
            None | Some(137) => return Ok(End::Killed),
            _ => serde_json::from_str(&stdout(output))
                .map_err(|error| format!("{}: {error}: {text}", output.status))?,
        };
        match code {
            Some(0) => {
                let hashes = report["hashes"].as_array().ok_or("no hashes")?;
                let hash = |hash: &serde_json::Value| {
                    (hash["name"].as_str().unwrap().to_owned(), hash["blake3"].as_str().unwrap().to_owned())
                };
                let is_right = hashes.iter().map(hash).collect::<BTreeMap<_, _>>() == self.hashes;
                let is_verified = report["runs"][0]["verified"]["mismatches"] == 0;
                match is_right && is_verified && report["verdict"] == "pass" {
                    true => Ok(End::Delivered),
                    false => Err("other bytes are reported as success".into()),
                }
            }
            Some(3 | 5) if text.contains("error[LC0") && report["verdict"] == "error" => Ok(End::Told),
            Some(130 | 143) if report["verdict"] == "error" => Ok(End::Interrupted),
            _ => Err(format!("it ends with {}: {text}", output.status)),
        }
    }

    /// Files and processes that a run has left in its place.
    pub(crate) fn leftovers(place: &Path) -> Vec<String> {
        let names = |folder: &Path| -> Vec<String> {
            let entries = fs::read_dir(folder).unwrap().flatten();
            entries.map(|entry| entry.path().display().to_string()).collect()
        };
        let mut left = names(&place.join("tmp"));
        left.extend(names(place).into_iter().filter(|name| !name.ends_with("/tmp")));
        for process in fs::read_dir("/proc").unwrap().flatten() {
            if fs::read_link(process.path().join("cwd")).is_ok_and(|cwd| cwd == place) {
                left.push(format!("process {}", process.file_name().display()));
            }
        }
        left
    }
}

/// The library that goes before the C library: see `shim.c`.
pub(crate) struct Shim(PathBuf);

/// What the library has counted over all processes of a run.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counted {
    /// Calls on the checkpoint.
    pub(crate) points: u64,
    /// When the signal was sent or the first stall began, since 1970; zero if it was not.
    fired_ns: u64,
    pub(crate) short_reads: u64,
    pub(crate) interrupts: u64,
    pub(crate) stalls: u64,
    pub(crate) clock_looks: u64,
}

impl Counted {
    /// True if the signal was sent, or a stall has begun.
    pub(crate) fn is_fired(&self) -> bool {
        self.fired_ns > 0
    }
}

impl Shim {
    /// Compiles it, once for all tests of a file. `None`, said aloud, where there is no C compiler.
    pub(crate) fn get() -> Option<&'static Self> {
        static SHIM: OnceLock<Option<Shim>> = OnceLock::new();
        SHIM.get_or_init(|| {
            let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
            let library = folder.join(format!("shim-{}.so", std::process::id()));
            let mut command = Command::new("cc");
            command.args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o"]).arg(&library);
            let output = command.arg(repository("crates/loadcheck/tests/faults/shim.c")).arg("-ldl").output();
            match output {
                Ok(output) if output.status.success() => Some(Self(library)),
                Ok(output) => panic!("{}", String::from_utf8_lossy(&output.stderr)),
                Err(_) => None,
            }
        })
        .as_ref()
        .or_else(|| {
            skipped("there is no C compiler (cc), and what it compiles makes the faults");
            None
        })
    }

    /// Runs a load behind the library, in a process group of its own. Tells how it ended, how long
    /// after the signal or the first stall if there was one, and what was counted.
    pub(crate) fn run(
        &self,
        world: &World,
        io: &str,
        place: &Path,
        settings: &[(&str, u64)],
    ) -> (Output, Duration, Counted) {
        self.run_command(world, world.load(io, place), place, settings)
    }

    /// Puts it before the C library in a command.
    pub(crate) fn put_before(&self, command: &mut Command, world: &World, settings: &[(&str, u64)]) {
        command.env("LD_PRELOAD", &self.0).env("SHIM_PATH", &world.model);
        command.envs(settings.iter().map(|(name, value)| (name, value.to_string())));
    }

    /// The same for any command on the checkpoint.
    pub(crate) fn run_command(
        &self,
        world: &World,
        mut command: Command,
        place: &Path,
        settings: &[(&str, u64)],
    ) -> (Output, Duration, Counted) {
        let state = place.with_extension("state");
        fs::write(&state, [0; 4096]).unwrap();
        self.put_before(&mut command, world, settings);
        command.env("SHIM_STATE", &state).process_group(0);
        let ended = output_within(&mut command, PATIENCE);
        let now_ns = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_nanos();
        let (output, _) = ended.unwrap_or_else(|| panic!("{settings:?}: it hangs: {command:?}"));
        let bytes = fs::read(&state).unwrap();
        let word = |at: usize| u64::from_le_bytes(bytes[8 * at..][..8].try_into().unwrap());
        let counted = Counted {
            points: word(0),
            fired_ns: word(1),
            short_reads: word(2),
            interrupts: word(3),
            stalls: word(4),
            clock_looks: word(5),
        };
        let since = now_ns.saturating_sub(u128::from(counted.fired_ns));
        (output, Duration::from_nanos(u64::try_from(since).unwrap()), counted)
    }
}

impl Drop for Shim {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}
