//! The promises of sources, tested on every source and every way of falling back: [`variants`]
//! lists them, and each test below runs on all.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use memmap2::MmapMut;
use rustix::io::Errno;
use tempfile::TempDir;

use self::faults::{Call, Faulty};
use self::queued::Queued;
use super::auto::Auto;
use super::survey::survey_with;
use super::system::{DirectSupport, Kernel, System};
use super::{IoMode, ReadRequest, Source, open_with};
use crate::checkpoint::{Shard, ShardId};
use crate::plan::IoReason;
use crate::units::{Alignment, ByteRange, KIB, MIB, to_u64, to_usize};
use onelayer_system::file_system::FileSystem;
use onelayer_system::page_cache::page_bytes;

mod changes;
mod choices;
mod exact;
mod faults;
mod limits;
mod queued;

/// One way of reading.
#[derive(Clone)]
struct Variant {
    name: String,
    mode: IoMode,
    system: Faulty,
    /// Files of this size or more end up buffered; `None`: never.
    falls_back_from_bytes: Option<u64>,
    /// The decision for every file, instead of the real one: test files are small.
    decided: Option<(IoMode, IoReason)>,
}

impl Variant {
    fn open(&self, shards: &[Shard]) -> Box<dyn Source> {
        let source = self.open_unqueued(shards);
        if self.is_queued() {
            return Box::new(Queued::new(source, !self.name.contains("not registered")));
        }
        source
    }

    fn open_unqueued(&self, shards: &[Shard]) -> Box<dyn Source> {
        let Some((mode, reason)) = self.decided else {
            return open_with(self.system.clone(), self.mode, shards).unwrap();
        };
        let mut decisions = survey_with(&self.system, shards).unwrap().decisions;
        for decision in &mut decisions {
            (decision.mode, decision.reason) = (mode, reason);
        }
        Box::new(Auto::open(self.system.clone(), shards, &decisions).unwrap())
    }

    /// Its reads go through a queue.
    fn is_queued(&self) -> bool {
        self.name.contains("queue")
    }

    fn decided(mut self, mode: IoMode, reason: IoReason) -> Self {
        self.decided = Some((mode, reason));
        self
    }

    /// The same way of reading with a hook that runs before calls.
    fn with_hook(&self, hook: impl Fn(Call, u64) -> Option<Errno> + Send + Sync + 'static) -> Self {
        let mut variant = self.clone();
        variant.system.hook = Some(Arc::new(hook));
        variant
    }
}

fn refusing(refused: fn(Call) -> bool, errno: Errno) -> Faulty {
    let refuse = move |call: Call, _count: u64| refused(call).then_some(errno);
    Faulty { refuse: Some(Arc::new(refuse)), ..Faulty::default() }
}

/// Every source: plain, with short counts and interruptions, and with every refusal.
fn variants() -> Vec<Variant> {
    use IoMode::{Buffered, Direct, Mmap};
    let plain = Faulty::default;
    let odd = || Faulty { short_bytes: &[1, 7, 4095, 4097, 100_000], ..plain() };
    let blocks = || Faulty { short_bytes: &[4096, 12_288, 8192], ..plain() };
    let interrupted = || Faulty { interrupt_every: Some(3), short_bytes: &[65_536], ..plain() };
    let support = |support| Faulty { support: Some(support), ..plain() };
    let is_direct = |call| matches!(call, Call::ReadAt { direct: true } | Call::Answered);
    let coarse = Alignment::new(64 * KIB).unwrap();
    let variant = |name: &str, mode, system, falls_back_from_bytes| Variant {
        name: name.to_owned(),
        mode,
        system,
        falls_back_from_bytes,
        decided: None,
    };
    let mut variants = vec![
        variant("buffered", Buffered, plain(), None),
        variant("buffered, short", Buffered, odd(), None),
        variant("buffered, interrupted", Buffered, interrupted(), None),
        variant("direct", Direct, plain(), None),
        variant("direct, short by blocks", Direct, blocks(), None),
        variant("direct, interrupted", Direct, interrupted(), None),
        variant("direct, alignment not reported", Direct, support(DirectSupport::Unknown), None),
        variant(
            "direct, 64 KiB alignment",
            Direct,
            Faulty {
                short_bytes: &[200_000],
                ..support(DirectSupport::Aligned { memory: coarse, offset: coarse })
            },
            None,
        ),
        variant(
            "direct, short inside a block",
            Direct,
            Faulty { short_bytes: &[4000], ..plain() },
            Some(4001),
        ),
        variant("direct, not supported", Direct, support(DirectSupport::None), Some(0)),
        variant(
            "direct, flag refused",
            Direct,
            refusing(|call| call == Call::SetDirect(true), Errno::INVAL),
            Some(0),
        ),
        variant("direct, read refused", Direct, refusing(is_direct, Errno::INVAL), Some(1)),
        variant("direct, read not supported", Direct, refusing(is_direct, Errno::OPNOTSUPP), Some(1)),
        variant("mmap", Mmap, plain(), None),
        variant("mmap, short", Mmap, odd(), None),
        variant("mmap, interrupted", Mmap, interrupted(), None),
        variant("mmap, refused", Mmap, refusing(|call| call == Call::Map, Errno::NODEV), Some(1)),
        variant("mmap, copy refused", Mmap, refusing(|call| call == Call::CopyOut, Errno::PERM), Some(1)),
        variant(
            "mmap, fault without a change",
            Mmap,
            refusing(|call| call == Call::CopyOut, Errno::FAULT),
            Some(1),
        ),
    ];
    variants.extend(queued_variants(&variants));
    variants.extend(auto_variants());
    variants
}

/// The variants of direct reads, through a queue. None where the system has no queues.
fn queued_variants(variants: &[Variant]) -> Vec<Variant> {
    if queued::refusal().is_some() {
        return Vec::new();
    }
    let is_direct = |name: &str| name == "direct" || name.starts_with("direct, ");
    let direct = variants.iter().filter(|variant| is_direct(&variant.name));
    let mut queued: Vec<Variant> = direct
        .map(|variant| Variant {
            mode: IoMode::Uring,
            name: variant.name.replace("direct", "queued"),
            ..variant.clone()
        })
        .collect();
    let name = "queued, buffers not registered".to_owned();
    let plain = queued.first().expect("there are variants of direct reads").clone();
    queued.push(Variant { name, system: Faulty::default(), falls_back_from_bytes: None, ..plain });
    queued
}

/// A disk file system, whatever really holds the test files.
fn on_disk() -> Faulty {
    Faulty { file_system: Some(FileSystem::from_raw(0xEF53)), ..Faulty::default() }
}

fn all_pages(bytes: ByteRange) -> u64 {
    bytes.len_bytes().div_ceil(page_bytes())
}

/// Every other range of 64 KiB is absent.
fn every_other(bytes: ByteRange) -> u64 {
    if (bytes.start() / (64 * KIB)).is_multiple_of(2) { all_pages(bytes) } else { 0 }
}

/// [`Auto`], made to take each of its ways.
fn auto_variants() -> Vec<Variant> {
    use IoMode::{Auto, Buffered, Direct};
    let variant = |name: &str, system, falls_back_from_bytes| Variant {
        name: name.to_owned(),
        mode: Auto,
        system,
        falls_back_from_bytes,
        decided: None,
    };
    let with = |resident: fn(ByteRange) -> u64| Faulty { resident: Some(resident), ..on_disk() };
    let held_by = |magic: i64| Faulty { file_system: Some(FileSystem::from_raw(magic)), ..Faulty::default() };
    let no_pages: fn(ByteRange) -> u64 = |_| 0;
    let refusing_direct = Faulty {
        refuse: refusing(|call| matches!(call, Call::ReadAt { direct: true } | Call::Answered), Errno::INVAL)
            .refuse,
        ..with(no_pages)
    };
    let mut variants = vec![
        variant("auto", Faulty::default(), None),
        variant("auto, small", Faulty { short_bytes: &[1, 7, 4095, 100_000], ..on_disk() }, None),
        variant(
            "auto, pages are not forgotten",
            Faulty {
                file_system: Some(FileSystem::from_raw(0xEF53)),
                ..refusing(|call| call == Call::ReadUncached, Errno::OPNOTSUPP)
            },
            None,
        ),
        variant("auto, network", Faulty { interrupt_every: Some(3), ..held_by(0x6969) }, None),
        variant("auto, memory", held_by(0x0102_1994), None),
        variant("auto, cold", Faulty { short_bytes: &[4096, 12_288], ..with(no_pages) }, None)
            .decided(Direct, IoReason::Cold),
        variant("auto, resident", with(all_pages), None).decided(Buffered, IoReason::Resident),
        variant("auto, partly resident", Faulty { interrupt_every: Some(5), ..with(every_other) }, None)
            .decided(Direct, IoReason::PartlyResident),
        variant("auto, wrongly cold", with(all_pages), None).decided(Direct, IoReason::Cold),
        variant("auto, wrongly resident", with(no_pages), None).decided(Buffered, IoReason::Resident),
        variant(
            "auto, residency unknown",
            Faulty {
                file_system: Some(FileSystem::from_raw(0xEF53)),
                ..refusing(
                    |call| matches!(call, Call::Cachestat | Call::Mincore | Call::ByteAtHand),
                    Errno::PERM,
                )
            },
            None,
        )
        .decided(Buffered, IoReason::ResidencyUnknown),
        variant("auto, direct read refused", refusing_direct, Some(1)).decided(Direct, IoReason::Cold),
    ];
    // The variants that may read direct, through a queue.
    let mut queued = if queued::refusal().is_some() { Vec::new() } else { variants.clone() };
    queued.retain(|variant| variant.decided.is_some());
    for variant in &mut queued {
        variant.name.push_str(", in a queue");
    }
    variants.extend(queued);
    variants
}

/// Runs a test on every variant, naming the one that fails.
fn on_all(test: impl Fn(&Variant)) {
    for variant in variants() {
        println!("{}", variant.name);
        test(&variant);
    }
}

/// Byte `offset_bytes` of every test file. Never zero, so that a hole or a lost page is noticed.
fn expected_byte(offset_bytes: u64) -> u8 {
    // splitmix64 of the offset.
    let mut word = offset_bytes.wrapping_add(0x9E37_79B9_7F4A_7C15);
    word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    (word ^ (word >> 31)).to_le_bytes()[0] | 1
}

fn expected_bytes(range: ByteRange) -> Vec<u8> {
    static FIRST_BYTES: OnceLock<Vec<u8>> = OnceLock::new();
    let first = FIRST_BYTES.get_or_init(|| (0..2 * MIB).map(expected_byte).collect());
    match first.get(to_usize(range.start())..to_usize(range.end())) {
        Some(bytes) => bytes.to_owned(),
        None => (range.start()..range.end()).map(expected_byte).collect(),
    }
}

/// A folder with test files.
struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A file of `len_bytes` expected bytes, checked.
    fn shard(&self, name: &str, len_bytes: u64) -> Shard {
        let path = self.path(name);
        // Some file systems flush a rewritten file at once; a new one stays in memory.
        let _ = std::fs::remove_file(&path);
        std::fs::write(&path, expected_bytes(range(0, len_bytes))).unwrap();
        check(&path)
    }
}

/// The identity of a file, once the clock of the file system has moved on since it was written: a
/// later change then gets another time, even on kernels with coarse clocks.
fn check(path: &Path) -> Shard {
    let (_, identity) = Kernel.open(path).unwrap();
    let mut clock = File::create(path.with_extension("clock")).unwrap();
    loop {
        clock.write_all(b"tick").unwrap();
        if Kernel.identity(&clock).unwrap().changed_ns > identity.changed_ns {
            return Shard {
                path: path.to_owned(),
                format: crate::checkpoint::FileFormat::Safetensors,
                identity,
                data: range(0, identity.len_bytes),
                metadata: Default::default(),
                name_prefix: Box::default(),
            };
        }
        std::thread::yield_now();
    }
}

fn range(start: u64, end: u64) -> ByteRange {
    ByteRange::new(start, end).unwrap()
}

/// The request for a payload, aligned for every source.
fn request(shard: u32, payload: ByteRange) -> ReadRequest {
    let alignment = Alignment::new(64 * KIB).unwrap();
    ReadRequest { shard: ShardId(shard), extent: payload.align_outward(alignment).unwrap(), payload }
}

/// A buffer aligned for any source, filled with neither zeros nor expected bytes.
struct Buffer {
    map: MmapMut,
    start: usize,
}

const POISON: u8 = 0xAA;

impl Buffer {
    fn new(len_bytes: u64) -> Self {
        let slack = 64 << 10;
        let mut map = MmapMut::map_anon(to_usize(len_bytes) + slack).unwrap();
        map.fill(POISON);
        let start = map.as_ptr().align_offset(slack);
        Self { map, start }
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.map[self.start..]
    }

    fn payload(&self, request: &ReadRequest) -> &[u8] {
        let from = self.start + to_usize(request.payload.start() - request.extent.start());
        &self.map[from..][..to_usize(request.payload.len_bytes())]
    }
}

/// Reads a payload and compares it; returns the source's result.
fn read_and_compare(
    source: &dyn Source,
    request: &ReadRequest,
    buffer: &mut Buffer,
) -> Result<u64, super::SourceError> {
    let moved_bytes = source.read(request, buffer.bytes())?;
    assert!(
        buffer.payload(request) == expected_bytes(request.payload),
        "wrong bytes of {} in {:?}",
        request.payload,
        source.mode()
    );
    assert!(moved_bytes >= request.payload.len_bytes(), "{moved_bytes} bytes for {}", request.payload);
    Ok(moved_bytes)
}

/// Writes expected bytes at an offset.
fn write_at(file: &File, place: ByteRange) {
    file.write_all_at(&expected_bytes(place), place.start()).unwrap();
    assert_eq!(to_u64(expected_bytes(place).len()), place.len_bytes());
}
