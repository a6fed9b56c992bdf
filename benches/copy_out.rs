#![allow(unsafe_code, reason = "compares raw ways of copying out of a mapping")]
#![allow(
    clippy::as_conversions,
    clippy::print_stdout,
    clippy::print_stderr,
    clippy::cast_precision_loss,
    clippy::cast_possible_wrap,
    missing_docs,
    reason = "a bench"
)]
//! Compares ways to copy out of a file mapping with `pread`, warm or cold. `docs/design.md` quotes
//! it for the choice of `process_vm_readv` on windows that are mapped for one read.
//!
//! `cargo bench -p onelayer --bench copy_out -- FILE [THREADS [BLOCK_MIB [RING_MIB [cold]]]]`
//!
//! Each thread takes blocks from a shared counter and copies them into its part of one huge-page
//! ring. All ways run in turn for five rounds; prints best and median. All but `memcpy` survive a
//! truncated file.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use memmap2::{Advice, MmapMut, MmapOptions, MmapRaw};

const ROUNDS: usize = 5;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    Pread,
    WindowReadv,
    WindowReadvNoPopulate,
    WindowReadvWillNeed,
    WholeReadv,
    WholeReadvNoPopulate,
    WindowMemcpy,
    WindowVmsplice,
    WindowPipe,
    WindowProcMem,
}

const WAYS: [(Way, &str); 10] = [
    (Way::Pread, "pread"),
    (Way::WindowReadv, "map, populate, process_vm_readv, unmap"),
    (Way::WindowReadvNoPopulate, "map, process_vm_readv, unmap"),
    (Way::WindowReadvWillNeed, "fadvise WILLNEED, map, populate, process_vm_readv, unmap"),
    (Way::WholeReadv, "whole map: populate, process_vm_readv, DONTNEED"),
    (Way::WholeReadvNoPopulate, "whole map: process_vm_readv, DONTNEED"),
    (Way::WindowMemcpy, "map, populate, memcpy (unsafe), unmap"),
    (Way::WindowVmsplice, "map, populate, vmsplice, read, unmap"),
    (Way::WindowPipe, "map, populate, write to pipe, read, unmap"),
    (Way::WindowProcMem, "map, populate, pread of /proc/self/mem, unmap"),
];

fn main() -> io::Result<()> {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    let Some(path) = words.first() else {
        eprintln!(
            "usage: cargo bench -p onelayer --bench copy_out -- FILE [THREADS [BLOCK_MIB [RING_MIB [cold]]]]"
        );
        return Ok(());
    };
    let number = |position: usize, default: usize| {
        words.get(position).map_or(default, |word| word.parse().expect("a number"))
    };
    let (threads, block, ring_len) = (number(1, 2), number(2, 4) << 20, number(3, 64) << 20);
    let cold = words.get(4).is_some_and(|word| word == "cold");
    let file = File::open(path)?;
    let len = usize::try_from(file.metadata()?.len()).expect("64 bits");
    let whole = MmapOptions::new().len(len).map_raw_read_only(&file)?;
    let mut ring = MmapMut::map_anon(ring_len)?;
    ring.advise(Advice::HugePage)?;
    ring.fill(1);
    println!(
        "{path}: {} MiB, {threads} threads, {} MiB blocks, {} MiB ring",
        len >> 20,
        block >> 20,
        ring_len >> 20
    );
    let mut rates = vec![Vec::new(); WAYS.len()];
    for _ in 0..=ROUNDS {
        for (way, rates) in WAYS.iter().zip(&mut rates) {
            if cold {
                drop_pages(&file);
            }
            rates.push(round(way.0, &file, &whole, len, &mut ring, threads, block));
        }
    }
    for ((_, name), rates) in WAYS.iter().zip(&mut rates) {
        // The first round warms up.
        let rates = &mut rates[1..];
        rates.sort_by(f64::total_cmp);
        println!("{:6.2} GiB/s best {:6.2} median  {name}", rates[ROUNDS - 1], rates[ROUNDS / 2]);
    }
    Ok(())
}

fn drop_pages(file: &File) {
    // SAFETY: gives advice about a descriptor and touches no memory.
    let rc = unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    assert_eq!(rc, 0);
}

fn round(
    way: Way,
    file: &File,
    whole: &MmapRaw,
    len: usize,
    ring: &mut MmapMut,
    threads: usize,
    block: usize,
) -> f64 {
    let next = AtomicUsize::new(0);
    let part = ring.len() / threads;
    let start = Instant::now();
    std::thread::scope(|scope| {
        for part in ring.chunks_mut(part).take(threads) {
            let next = &next;
            scope.spawn(move || {
                let tools = Tools::new();
                for slot in (0..part.len() / block).cycle() {
                    let offset = next.fetch_add(1, Ordering::Relaxed) * block;
                    if offset >= len {
                        return;
                    }
                    let target = &mut part[slot * block..][..block.min(len - offset)];
                    copy(way, file, whole, offset, target, &tools).expect("every way works on a warm file");
                }
            });
        }
    });
    (len as f64) / start.elapsed().as_secs_f64() / (1u64 << 30) as f64
}

/// Per-thread resources of some ways.
struct Tools {
    pipe_in: File,
    pipe_out: File,
    pipe_len: usize,
    memory: File,
}

impl Tools {
    fn new() -> Self {
        let mut ends = [0; 2];
        // SAFETY: the array has room for the two descriptors that pipe2 writes.
        assert_eq!(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) }, 0);
        // SAFETY: the descriptor is new and has no other owner.
        let pipe_out = unsafe { File::from_raw_fd(ends[0]) };
        // SAFETY: as above.
        let pipe_in = unsafe { File::from_raw_fd(ends[1]) };
        // SAFETY: F_SETPIPE_SZ takes an int and touches no memory.
        let pipe_len = unsafe { libc::fcntl(ends[1], libc::F_SETPIPE_SZ, 1 << 20) };
        let memory = File::open("/proc/self/mem").expect("procfs");
        Self { pipe_in, pipe_out, pipe_len: usize::try_from(pipe_len).expect("1 MiB"), memory }
    }
}

fn copy(
    way: Way,
    file: &File,
    whole: &MmapRaw,
    offset: usize,
    target: &mut [u8],
    tools: &Tools,
) -> io::Result<()> {
    match way {
        Way::Pread => return file.read_exact_at(target, offset as u64),
        Way::WholeReadv | Way::WholeReadvNoPopulate => {
            if way == Way::WholeReadv {
                whole.advise_range(Advice::PopulateRead, offset, target.len())?;
            }
            let start = whole.as_ptr().wrapping_add(offset);
            readv(start, target)?;
            // SAFETY: the mapping is shared and read-only, without references into it, so dropping
            // its pages changes nothing observable.
            let rc = unsafe { libc::madvise(start.cast_mut().cast(), target.len(), libc::MADV_DONTNEED) };
            assert_eq!(rc, 0);
            return Ok(());
        }
        _ => {}
    }
    if way == Way::WindowReadvWillNeed {
        let fd = file.as_raw_fd();
        // SAFETY: gives advice about a descriptor and touches no memory.
        unsafe { libc::posix_fadvise(fd, offset as i64, target.len() as i64, libc::POSIX_FADV_WILLNEED) };
    }
    let window = MmapOptions::new().offset(offset as u64).len(target.len()).map_raw_read_only(file)?;
    if way != Way::WindowReadvNoPopulate {
        window.advise_range(Advice::PopulateRead, 0, window.len())?;
    }
    let start = window.as_ptr();
    match way {
        Way::WindowReadv | Way::WindowReadvNoPopulate | Way::WindowReadvWillNeed => readv(start, target)?,
        Way::WindowMemcpy => {
            // SAFETY: both have `target.len()` bytes and do not overlap; the file is not truncated
            // here.
            unsafe { std::ptr::copy_nonoverlapping(start, target.as_mut_ptr(), target.len()) };
        }
        Way::WindowProcMem => tools.memory.read_exact_at(target, start.addr() as u64)?,
        _ => {
            for (index, chunk) in target.chunks_mut(tools.pipe_len).enumerate() {
                let from = start.wrapping_add(index * tools.pipe_len);
                through_pipe(way, from, chunk, tools)?;
            }
        }
    }
    Ok(())
}

fn readv(from: *const u8, target: &mut [u8]) -> io::Result<()> {
    let local = libc::iovec { iov_base: target.as_mut_ptr().cast(), iov_len: target.len() };
    let remote = libc::iovec { iov_base: from.cast_mut().cast(), iov_len: target.len() };
    // SAFETY: getpid touches no memory.
    let this = unsafe { libc::getpid() };
    // SAFETY: `local` is exclusively borrowed; `remote` is only read, by the kernel.
    let count = unsafe { libc::process_vm_readv(this, &local, 1, &remote, 1, 0) };
    if usize::try_from(count) == Ok(target.len()) { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn through_pipe(way: Way, from: *const u8, chunk: &mut [u8], tools: &Tools) -> io::Result<()> {
    let mut filled = 0;
    let mut queued = 0;
    while filled < chunk.len() {
        if queued < chunk.len() {
            let source = libc::iovec {
                iov_base: from.wrapping_add(queued).cast_mut().cast(),
                iov_len: chunk.len() - queued,
            };
            let pipe = tools.pipe_in.as_raw_fd();
            let count = if way == Way::WindowVmsplice {
                // SAFETY: the kernel takes references to the pages; they are only read.
                unsafe { libc::vmsplice(pipe, &source, 1, 0) }
            } else {
                // SAFETY: the kernel reads the bytes with its own fault handling.
                unsafe { libc::write(pipe, source.iov_base, source.iov_len) }
            };
            queued += usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
        }
        while filled < queued {
            filled += io::Read::read(&mut &tools.pipe_out, &mut chunk[filled..])?;
        }
    }
    Ok(())
}
