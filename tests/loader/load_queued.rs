//! Reads in a queue of the kernel's: what the load does with it, and what it does where a sandbox
//! or a limit refuses it. What a process forbids itself cannot be taken back, so each refusal runs
//! in a process of its own.
#![cfg(all(target_os = "linux", feature = "uring"))]
#![allow(unsafe_code, reason = "limits and filters of this process")]
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test that cannot go on panics, and repeats what its child says"
)]

use std::os::unix::fs::PermissionsExt;

use onelayer::source::Queueing;
use onelayer::{Checkpoint, FloatType, IoMode, LoadReport, Loader, Quantisation, Target};
use onelayer_testing::{in_own_process, skipped, small_decoder, write_sharded};

/// A checkpoint that anybody may read.
fn checkpoint() -> (tempfile::TempDir, Checkpoint) {
    let folder = tempfile::tempdir().unwrap();
    write_sharded(folder.path(), &small_decoder(4, 900_000));
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    (folder, checkpoint)
}

/// The same, of single precision: random bits but those of the exponent, which leave it finite.
fn checkpoint_of_floats() -> (tempfile::TempDir, Checkpoint) {
    let folder = tempfile::tempdir().unwrap();
    let mut shards = small_decoder(4, 900_000);
    for tensor in shards.iter_mut().flatten() {
        let rows = tensor.bytes.len() / (4 * 64);
        tensor.bytes.truncate(rows * 4 * 64);
        tensor.bytes.iter_mut().skip(3).step_by(4).for_each(|byte| *byte &= 0x3f);
        (tensor.dtype, tensor.shape) = ("F32", vec![u64::try_from(rows).unwrap(), 64]);
    }
    write_sharded(folder.path(), &shards);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    (folder, checkpoint)
}

/// Loads all of it and compares it with what buffered reads deliver.
fn load(checkpoint: &Checkpoint) -> LoadReport {
    let hashes = |io| {
        let loader = Loader::builder(Target::None).io(io).hash(true).build().unwrap();
        let mut stream = loader.stream(checkpoint).unwrap();
        let mut hashes = Vec::new();
        for layer in &mut stream {
            let layer = layer.unwrap();
            hashes.extend(layer.tensors().map(|t| format!("{} {:?}", t.name(), t.hash().unwrap().unwrap())));
        }
        assert!(!hashes.is_empty());
        (hashes, stream.report())
    };
    let (queued, report) = hashes(IoMode::Uring);
    assert!(queued == hashes(IoMode::Buffered).0, "wrong bytes");
    report
}

/// True, said aloud, if there are no queues here to be refused.
fn has_no_queues(checkpoint: &Checkpoint) -> bool {
    match load(checkpoint).queueing {
        Queueing::Registered => false,
        other => {
            skipped(other);
            true
        }
    }
}

#[test]
fn queued_reads_deliver_to_every_target() {
    let (_folder, checkpoint) = checkpoint();
    if has_no_queues(&checkpoint) {
        return;
    }
    let bytes = |io, readers: Option<u32>, dtype: Option<FloatType>| {
        let mut builder = Loader::builder(Target::Host).io(io).host_budget(9 << 20);
        if let Some(readers) = readers {
            builder = builder.readers(readers);
        }
        if let Some(dtype) = dtype {
            builder = builder.dtype(dtype);
        }
        let mut stream = builder.build().unwrap().stream(&checkpoint).unwrap();
        let mut tensors = Vec::new();
        for layer in &mut stream {
            let layer = layer.unwrap();
            tensors.extend(layer.tensors().map(|t| (t.name().to_owned(), t.as_bytes().unwrap().to_vec())));
        }
        (tensors, stream.report())
    };
    for dtype in [None, Some(FloatType::Bf16)] {
        let (expected, report) = bytes(IoMode::Buffered, None, dtype);
        assert_eq!(report.queueing, Queueing::NotAsked);
        for readers in [None, Some(1), Some(3), Some(50)] {
            let (found, report) = bytes(IoMode::Uring, readers, dtype);
            assert!(found == expected, "{readers:?} in flight, {dtype:?}");
            assert_eq!((report.queueing, report.fallbacks), (Queueing::Registered, Vec::new()));
        }
    }
}

/// What is done with bytes on the way to memory of the host.
#[derive(Clone, Copy, Debug)]
enum Work {
    Copied,
    Cast,
    Quantised,
}

/// Every tensor's bytes, on the host.
fn load_on_host(checkpoint: &Checkpoint, io: IoMode, work: Work) -> (Vec<Vec<u8>>, LoadReport) {
    let builder = Loader::builder(Target::Host).io(io).host_budget(16 << 20);
    let builder = match work {
        Work::Copied => builder,
        Work::Cast => builder.dtype(FloatType::Bf16),
        Work::Quantised => builder.quantise(Quantisation::Int8),
    };
    let mut stream = builder.build().unwrap().stream(checkpoint).unwrap();
    let mut bytes = Vec::new();
    for layer in &mut stream {
        bytes.extend(layer.unwrap().tensors().map(|tensor| tensor.as_bytes().unwrap().to_vec()));
    }
    (bytes, stream.report())
}

/// Has the kernel forget the pages of a checkpoint; false, said aloud, where it keeps them or reads
/// no file past the page cache.
fn is_cold(checkpoint: &Checkpoint) -> bool {
    for shard in checkpoint.shards() {
        let file = std::fs::File::open(&shard.path).unwrap();
        file.sync_all().unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    }
    let decisions = onelayer::source::survey(checkpoint).unwrap().decisions;
    let is_cold = decisions.iter().all(|decision| decision.mode == IoMode::Direct);
    if !is_cold {
        skipped(format_args!("{decisions:?}"));
    }
    is_cold
}

#[test]
fn what_is_cold_and_goes_to_the_host_is_queued_without_being_asked_for() {
    let (_folder, checkpoint) = checkpoint_of_floats();
    let mut sizes = Vec::new();
    for work in [Work::Copied, Work::Cast, Work::Quantised] {
        let (expected, report) = load_on_host(&checkpoint, IoMode::Buffered, work);
        assert_eq!(report.queueing, Queueing::NotAsked);
        if has_no_queues(&checkpoint) || !is_cold(&checkpoint) {
            return;
        }
        let (found, report) = load_on_host(&checkpoint, IoMode::Auto, work);
        assert!(found == expected, "{work:?}: wrong bytes");
        assert_eq!((report.queueing, report.fallbacks), (Queueing::Queued, Vec::new()));
        assert!(report.ways.direct_bytes > 0 && report.ways.corrected_bytes == 0, "{:?}", report.ways);
        sizes.push(found.iter().map(Vec::len).sum::<usize>());
    }
    assert!(sizes[2] < sizes[1] && sizes[1] < sizes[0], "something was done: {sizes:?}");
}

/// As container runtimes do it: the call is answered with an error, and the process lives.
#[test]
fn a_filter_of_system_calls_is_a_named_refusal() {
    if in_own_process(module_path!(), "a_filter_of_system_calls_is_a_named_refusal") {
        return;
    }
    let (_folder, checkpoint) = checkpoint();
    if has_no_queues(&checkpoint) {
        return;
    }
    forbid(libc::SYS_io_uring_setup);
    let report = load(&checkpoint);
    let Queueing::Refused { reason } = &report.queueing else { panic!("{:?}", report.queueing) };
    assert!(reason.contains("io_uring_setup was refused: Operation not permitted"), "{reason}");
    assert_eq!(report.fallbacks, [], "its files are read direct, as they would be in a queue");
    if is_cold(&checkpoint) {
        let (_, report) = load_on_host(&checkpoint, IoMode::Auto, Work::Copied);
        assert!(matches!(report.queueing, Queueing::Refused { .. }), "{:?}", report.queueing);
        assert!(report.ways.direct_bytes > 0 && report.ways.buffered_bytes == 0, "{:?}", report.ways);
    }
}

/// Answers a system call of this number with EPERM from now on.
fn forbid(number: libc::c_long) {
    let number = u32::try_from(number).unwrap();
    let load = u16::try_from(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS).unwrap();
    let is_equal = u16::try_from(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K).unwrap();
    let answer = u16::try_from(libc::BPF_RET | libc::BPF_K).unwrap();
    let refusal = libc::SECCOMP_RET_ERRNO | u32::try_from(libc::EPERM).unwrap();
    let step = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let mut steps = [
        step(load, 0, 0, 0), // the number of the call comes first in what is filtered
        step(is_equal, 0, 1, number),
        step(answer, 0, 0, refusal),
        step(answer, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: u16::try_from(steps.len()).unwrap(), filter: steps.as_mut_ptr() };
    // SAFETY: takes no pointer.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }, 0);
    // SAFETY: the program is a live one of that many steps, and the kernel keeps a copy.
    let set = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            libc::SECCOMP_FILTER_FLAG_TSYNC,
            &raw const program,
        )
    };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
}

#[test]
fn a_limit_of_locked_memory_is_a_named_refusal() {
    if in_own_process(module_path!(), "a_limit_of_locked_memory_is_a_named_refusal") {
        return;
    }
    let (_folder, checkpoint) = checkpoint();
    if has_no_queues(&checkpoint) {
        return;
    }
    let none = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
    rustix::process::setrlimit(rustix::process::Resource::Memlock, none).unwrap();
    if rustix::process::geteuid().is_root() {
        // The limit is not for those who may lock memory: from here on this is somebody who may not.
        // SAFETY: a number, for all threads of this process.
        assert_eq!(unsafe { libc::setuid(65_534) }, 0, "{}", std::io::Error::last_os_error());
    }
    let report = load(&checkpoint);
    match &report.queueing {
        Queueing::Unregistered { reason } => assert!(reason.contains("Cannot allocate memory"), "{reason}"),
        // Kernels before 5.12 count the queue itself.
        Queueing::Refused { reason } => assert!(reason.contains("io_uring_setup was refused"), "{reason}"),
        other => panic!("{other}"),
    }
    assert_eq!(report.fallbacks, []);
}
