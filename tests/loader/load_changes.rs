//! A file that somebody changes while it is loaded, at a point drawn at random, with every source:
//! either the load ends with an error that names the file, or every byte of that file had been read
//! before. What was handed out stays what the file held when it was checked.
//!
//! Points are places in the load, not times: before it begins, before its nth layer is asked for,
//! or from a thread beside it once so many bytes have been read. `ONELAYER_TRIALS=1500 cargo test
//! -p onelayer --test loader load_changes -- --nocapture` takes more than the hundred of each run;
//! a failure names its seed, and `ONELAYER_SEED` begins elsewhere.
#![allow(
    clippy::unwrap_used,
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    clippy::print_stdout,
    reason = "a test that cannot go on panics, and says what it counted"
)]

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File, OpenOptions};
use std::io::{Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, SystemTime};

use onelayer::{
    Checkpoint, IoMode, LoadError, LoadedLayer, Loader, LoaderBuilder, ReadOrder, SourceError, Target,
    TensorReader, Window,
};
use onelayer_testing::{Random, TestTensor, random_bytes, small_decoder, write_sharded};

const LAYERS: usize = 7;
const MODES: [IoMode; 5] = [IoMode::Auto, IoMode::Buffered, IoMode::Mmap, IoMode::Direct, IoMode::Uring];

/// What somebody does to a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Change {
    Truncate,
    TruncateAndRegrow,
    Rewrite,
    RewriteAndBackdate,
    Append,
    RenameOver,
    Unlink,
}

const CHANGES: [Change; 7] = [
    Change::Truncate,
    Change::TruncateAndRegrow,
    Change::Rewrite,
    Change::RewriteAndBackdate,
    Change::Append,
    Change::RenameOver,
    Change::Unlink,
];

/// When it is done.
#[derive(Clone, Copy, Debug)]
enum Point {
    /// After the headers were checked, before the load begins.
    BeforeTheLoad,
    /// Before the layer of this number is asked for.
    BeforeLayer(usize),
    /// As soon as so many bytes have been read, by a thread beside the load.
    AfterBytes(u64),
}

/// What became of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Verdict {
    /// The load ended with an error, as it had to: bytes of the file were still to be read.
    Detected,
    /// The load ended with an error, and might have been over with that file.
    DetectedInTime,
    /// The load came through: all bytes of the file had been read before.
    ReadBefore,
}

/// A checkpoint in memory, to be written for each trial.
struct World {
    files: Vec<(String, Vec<u8>)>,
    tensors: HashMap<String, (usize, Vec<u8>)>,
    /// By turn: the files that the layer has bytes in.
    turns: Vec<Vec<usize>>,
    read_bytes: u64,
    /// The clock that stamps files is too slow to tell one write from the next.
    is_clock_coarse: bool,
}

impl World {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let shards = small_decoder(LAYERS, 40_000);
        write_sharded(folder.path(), &shards);
        let mut files: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap()).collect();
        files.sort_by_key(fs::DirEntry::file_name);
        let files: Vec<_> = files
            .iter()
            .map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap()))
            .collect();
        let of_shard = |(number, tensors): (usize, Vec<TestTensor>)| {
            tensors.into_iter().map(move |tensor| (tensor.name, (number, tensor.bytes)))
        };
        let tensors: HashMap<_, _> = shards.into_iter().enumerate().flat_map(of_shard).collect();
        let mut world =
            Self { files, tensors, turns: Vec::new(), read_bytes: 0, is_clock_coarse: is_clock_coarse() };
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let mut stream = loader(IoMode::Buffered).build().unwrap().stream(&checkpoint).unwrap();
        for layer in stream.by_ref() {
            let layer = layer.unwrap();
            world.compare(&layer).unwrap();
            let mut shards: Vec<_> = layer
                .tensors()
                .filter(|tensor| tensor.len_bytes() > 0)
                .map(|tensor| world.tensors[tensor.name()].0)
                .collect();
            shards.dedup();
            world.turns.push(shards);
        }
        world.read_bytes = stream.report().read_bytes;
        world
    }

    fn write(&self, folder: &Path) {
        for (name, bytes) in &self.files {
            fs::write(folder.join(name), bytes).unwrap();
        }
        if self.is_clock_coarse {
            thread::sleep(Duration::from_millis(20));
        }
    }

    fn path(&self, folder: &Path, shard: usize) -> PathBuf {
        folder.join(&self.files[shard].0)
    }

    /// What is wrong with the bytes of a layer.
    fn compare(&self, layer: &LoadedLayer) -> Result<(), String> {
        for tensor in layer.tensors() {
            if tensor.as_bytes().unwrap() != self.tensors[tensor.name()].1 {
                return Err(format!("wrong bytes of {}", tensor.name()));
            }
        }
        Ok(())
    }

    /// True if a layer of this turn or a later one has bytes in the file.
    fn is_unread(&self, shard: usize, turn: usize) -> bool {
        self.turns.iter().skip(turn).any(|shards| shards.contains(&shard))
    }
}

fn loader(io: IoMode) -> LoaderBuilder {
    Loader::builder(Target::Host).io(io).host_budget(8 << 20)
}

/// True, said aloud, if two writes after each other may leave the same time: then each trial waits
/// a little.
fn is_clock_coarse() -> bool {
    let file = tempfile::NamedTempFile::new().unwrap();
    let stamp = || {
        fs::write(file.path(), b"x").unwrap();
        file.as_file().metadata().unwrap().modified().unwrap()
    };
    let is_coarse = (0..20).any(|_| stamp() == stamp());
    if is_coarse {
        println!("the clock of this file system is coarse: each trial waits for it to move on");
    }
    is_coarse
}

/// One load that is disturbed once.
#[derive(Debug)]
struct Trial {
    io: IoMode,
    change: Change,
    point: Point,
    shard: usize,
    window: Window,
    prefetch: u32,
    order: ReadOrder,
    readers: Option<u32>,
    is_cold: bool,
    seed: u64,
}

impl Trial {
    fn new(world: &World, seed: u64) -> Self {
        let mut random = Random(seed);
        let turns = world.turns.len() as u64;
        let order = if random.one_in(6) { ReadOrder::Files } else { ReadOrder::Layers };
        let window = match order {
            ReadOrder::Files => Window::All,
            ReadOrder::Layers => {
                random.of(&[Window::Layers(1), Window::Layers(2), Window::Layers(4), Window::All])
            }
        };
        Self {
            io: MODES[(seed % 5) as usize],
            change: CHANGES[(seed / 5 % 7) as usize],
            point: match random.below(8) {
                0 => Point::BeforeTheLoad,
                1..4 => Point::BeforeLayer(random.below(turns) as usize),
                _ => Point::AfterBytes(random.below(world.read_bytes)),
            },
            shard: usize::from(!random.one_in(3)),
            window,
            prefetch: random.number(3),
            order,
            readers: random.of(&[None, Some(1), Some(3)]),
            is_cold: random.one_in(3),
            seed,
        }
    }

    fn damage(&self, path: &Path) {
        let mut random = Random(!self.seed);
        let len_bytes = fs::metadata(path).unwrap().len();
        let open = || OpenOptions::new().write(true).open(path).unwrap();
        match self.change {
            Change::Truncate => {
                let kept = if random.one_in(3) { 0 } else { random.below(len_bytes) };
                open().set_len(kept).unwrap();
            }
            Change::TruncateAndRegrow => {
                let file = open();
                file.set_len(random.below(len_bytes)).unwrap();
                file.set_len(len_bytes).unwrap();
            }
            Change::Rewrite | Change::RewriteAndBackdate => {
                let mut file = open();
                let times = file.metadata().unwrap();
                let start = if random.one_in(3) { 0 } else { random.below(len_bytes) };
                file.seek(SeekFrom::Start(start)).unwrap();
                let rest = (len_bytes - start) as usize;
                let len = if random.one_in(2) { rest } else { rest.min(1 + random.below(5000) as usize) };
                file.write_all(&random_bytes(len, self.seed)).unwrap();
                if self.change == Change::RewriteAndBackdate {
                    file.set_modified(times.modified().unwrap()).unwrap();
                }
            }
            Change::Append => {
                let mut file = OpenOptions::new().append(true).open(path).unwrap();
                file.write_all(&random_bytes(1 + random.below(9000) as usize, self.seed)).unwrap();
            }
            Change::RenameOver => {
                let other = path.with_extension("new");
                if random.one_in(2) {
                    fs::copy(path, &other).unwrap();
                } else {
                    fs::write(&other, random_bytes(len_bytes as usize, self.seed)).unwrap();
                }
                fs::rename(&other, path).unwrap();
            }
            Change::Unlink => fs::remove_file(path).unwrap(),
        }
    }

    fn run(&self, world: &World) -> Result<Verdict, String> {
        let folder = tempfile::tempdir().unwrap();
        world.write(folder.path());
        let path = world.path(folder.path(), self.shard);
        if self.is_cold {
            let file = File::open(&path).unwrap();
            file.sync_all().unwrap();
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        }
        let checkpoint = Checkpoint::open(folder.path()).map_err(|error| error.to_string())?;
        if matches!(self.point, Point::BeforeTheLoad) {
            self.damage(&path);
        }
        let mut builder = loader(self.io).window(self.window).prefetch(self.prefetch).read_order(self.order);
        if let Some(readers) = self.readers {
            builder = builder.readers(readers);
        }
        let mut stream = match builder.build().unwrap().stream(&checkpoint) {
            Ok(stream) => stream,
            Err(error) => return self.judge(Some(&error), &path, true),
        };
        let (asked, is_over) = (AtomicUsize::new(0), AtomicBool::new(false));
        let progress = stream.progress();
        let beside = || {
            let Point::AfterBytes(bytes) = self.point else { return None };
            while progress.read_bytes() < bytes && !is_over.load(Ordering::SeqCst) {
                std::hint::spin_loop();
            }
            self.damage(&path);
            Some(asked.load(Ordering::SeqCst))
        };
        thread::scope(|scope| {
            let beside = scope.spawn(beside);
            let mut asked_before = None;
            let outcome = loop {
                let turn = asked.load(Ordering::SeqCst);
                if matches!(self.point, Point::BeforeLayer(at) if at == turn) {
                    self.damage(&path);
                    asked_before = Some(turn);
                }
                asked.store(turn + 1, Ordering::SeqCst);
                match stream.next() {
                    Some(Ok(layer)) => {
                        if let Err(wrong) = world.compare(&layer) {
                            break Err(wrong);
                        }
                    }
                    Some(Err(error)) => break Ok(Some(error)),
                    None => break Ok(None),
                }
            };
            is_over.store(true, Ordering::SeqCst);
            let asked_before = beside.join().unwrap().or(asked_before);
            // What is asked for, and so many beyond, may have been read by then; in the order of files,
            // anything.
            let is_unread = match (asked_before, self.order) {
                (Some(asked), ReadOrder::Layers) => {
                    world.is_unread(self.shard, asked + self.prefetch as usize)
                }
                (Some(_), ReadOrder::Files) => false,
                (None, _) => matches!(self.point, Point::BeforeTheLoad),
            };
            self.judge(outcome?.as_ref(), &path, is_unread)
        })
    }

    fn judge(&self, error: Option<&LoadError>, path: &Path, is_unread: bool) -> Result<Verdict, String> {
        let Some(error) = error else {
            return if is_unread { Err("it was not noticed".into()) } else { Ok(Verdict::ReadBefore) };
        };
        let is_typed = match error {
            LoadError::Source(SourceError::FileChanged { path: named, .. }) => named == path,
            // Who opens it again finds nothing there.
            LoadError::Source(SourceError::Open { path: named, .. }) => {
                named == path && self.change == Change::Unlink
            }
            _ => false,
        };
        match is_typed {
            true if is_unread => Ok(Verdict::Detected),
            true => Ok(Verdict::DetectedInTime),
            false => Err(format!("another error: {error}")),
        }
    }
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

#[test]
fn no_change_goes_unnoticed_and_no_wrong_byte_is_handed_out() {
    let (trials, first) = (setting("ONELAYER_TRIALS", 105), setting("ONELAYER_SEED", 0));
    let world = World::new();
    let mut counts = BTreeMap::<Verdict, u64>::new();
    let mut of_kind = BTreeMap::<(String, Change), u64>::new();
    let mut wrong = Vec::new();
    let start = SystemTime::now();
    for seed in first..first + trials {
        let trial = Trial::new(&world, seed);
        match trial.run(&world) {
            Ok(verdict) => {
                *counts.entry(verdict).or_default() += 1;
                if verdict != Verdict::ReadBefore {
                    *of_kind.entry((format!("{:?}", trial.io), trial.change)).or_default() += 1;
                }
            }
            Err(problem) => wrong.push(format!("{problem}: {trial:?}")),
        }
    }
    println!(
        "{trials} changes in {:.1} s: {counts:?}, {} wrong",
        start.elapsed().unwrap().as_secs_f64(),
        wrong.len()
    );
    assert!(
        wrong.is_empty(),
        "{} are wrong; the first:\n{}",
        wrong.len(),
        wrong[..wrong.len().min(10)].join("\n")
    );
    let count = |verdict| counts.get(&verdict).copied().unwrap_or(0);
    // Most points lie where there is something to notice, and sources have met changes of all kinds.
    assert!(count(Verdict::Detected) * 2 > trials, "{counts:?}");
    let kinds = MODES.len() * CHANGES.len();
    let kinds_least = if trials >= 1000 { kinds } else { kinds * 3 / 4 };
    assert!(trials < 105 || of_kind.len() >= kinds_least, "{of_kind:?}");
}

/// The reader of single tensors, changed between two of them.
#[test]
fn a_reader_of_tensors_notices_too() {
    let world = World::new();
    for (number, change) in (0..).zip(CHANGES) {
        let folder = tempfile::tempdir().unwrap();
        world.write(folder.path());
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let reader = TensorReader::open(&checkpoint).unwrap();
        let trial = Trial { change, shard: number as usize % 2, ..Trial::new(&world, number) };
        let path = world.path(folder.path(), trial.shard);
        let read = |id| {
            let entry = checkpoint.tensor(id);
            let mut bytes = vec![0; entry.extent.len_bytes() as usize];
            reader.read(id, 0, &mut bytes).map(|()| assert!(bytes == world.tensors[entry.name].1))
        };
        let inside: Vec<_> = checkpoint
            .tensors()
            .filter(|entry| world.tensors[entry.name].0 == trial.shard && entry.extent.len_bytes() > 0)
            .map(|entry| entry.id)
            .collect();
        read(inside[0]).unwrap();
        trial.damage(&path);
        for id in &inside {
            let error = read(*id).unwrap_err();
            assert_eq!(trial.judge(Some(&error), &path, true), Ok(Verdict::Detected), "{change:?}");
        }
    }
}
