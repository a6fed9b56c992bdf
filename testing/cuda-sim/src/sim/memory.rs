//! Device memory: allocations, their bytes, and the order of their uses.
//!
//! Addresses are not canonical, so no process can map memory there, and a host that dereferences
//! one crashes. No address is reused. The bytes are in an unmapped memory file, so they are not
//! part of the process's resident memory, as on a device.
#![allow(unsafe_code, reason = "reads and writes the memory file by raw system calls")]

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;

use super::{Sim, to_u64};
use crate::clock::{Clock, Point};
use crate::code::{Answer, Code};

/// The first address. On x86-64, bits 48 to 63 of a pointer repeat bit 47; on other architectures
/// user addresses are far below.
const FIRST_ADDRESS: u64 = 0x0007_0000_0000_0000;
/// Address range of each device.
const DEVICE_SPAN: u64 = 1 << 42;
/// Gap between allocations, so that an overrun hits no other allocation.
const GAP_BYTES: u64 = 1 << 20;
/// The guaranteed alignment (`cuMemAlloc`: "suitably aligned for any kind of variable"; 256 in
/// practice), and no more.
const ALIGNMENT: u64 = 256;
/// The unit of device memory.
pub(crate) const GRAIN_BYTES: u64 = 2 << 20;
/// The fill byte of new memory.
const POISON: u8 = 0xA5;
/// Stored accesses of an allocation, until the host is known to have waited for them.
const ACCESSES_MAX: usize = 128;

/// The bytes of one device. The offset is the address minus the device's first address.
#[derive(Debug)]
pub(crate) struct DeviceBytes(File);

impl DeviceBytes {
    pub(crate) fn new() -> std::io::Result<Self> {
        // SAFETY: the name is a C string; the call takes nothing else.
        let descriptor = unsafe { libc::memfd_create(c"simulated-device".as_ptr(), libc::MFD_CLOEXEC) };
        if descriptor < 0 {
            return Err(std::io::Error::last_os_error());
        }
        // SAFETY: just created, with no other owner.
        let file = unsafe { File::from_raw_fd(descriptor) };
        file.set_len(DEVICE_SPAN)?;
        Ok(Self(file))
    }

    /// Reads at most `len` bytes; `None` if the target is missing.
    ///
    /// # Safety
    /// The caller of the driver requested to write `len` bytes at `target`.
    pub(crate) unsafe fn read_to(&self, target: *mut u8, len: usize, offset: u64) -> Option<usize> {
        let offset = libc::off_t::try_from(offset).ok()?;
        // SAFETY: the caller's promise; the kernel checks that the memory is there.
        let read = unsafe { libc::pread(self.0.as_raw_fd(), target.cast(), len, offset) };
        usize::try_from(read).ok().filter(|&read| read > 0)
    }

    pub(crate) fn write(&self, bytes: &[u8], offset: u64) {
        self.0.write_all_at(bytes, offset).expect("the memory file takes what the machine's memory takes");
    }

    pub(crate) fn read(&self, bytes: &mut [u8], offset: u64) {
        self.0.read_exact_at(bytes, offset).expect("the memory file is as long as the device's addresses");
    }

    pub(crate) fn fill(&self, value: u8, offset: u64, len_bytes: u64) {
        let chunk = vec![value; 1 << 18];
        let mut done = 0;
        while done < len_bytes {
            let part = (len_bytes - done).min(to_u64(chunk.len()));
            self.write(&chunk[..usize::try_from(part).expect("not above the chunk's length")], offset + done);
            done += part;
        }
    }

    /// Returns the pages of a range to the system.
    fn drop_range(&self, offset: u64, len_bytes: u64) {
        let (Ok(offset), Ok(len)) = (libc::off_t::try_from(offset), libc::off_t::try_from(len_bytes)) else {
            return;
        };
        let flags = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: takes numbers only. A failure only keeps pages longer.
        let _ = unsafe { libc::fallocate(self.0.as_raw_fd(), flags, offset, len) };
    }
}

/// A device.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) bytes: DeviceBytes,
    pub(crate) total_bytes: u64,
    /// Used by this process: plain allocations, pools and contexts.
    pub(crate) taken_bytes: u64,
    /// Used by other processes.
    pub(crate) other_bytes: u64,
    pub(crate) primary: Option<usize>,
    pub(crate) primary_references: u64,
    /// The code that lost its context.
    pub(crate) lost: Option<Code>,
    pub(crate) default_pool: usize,
    pub(crate) current_pool: usize,
    next_address: u64,
}

impl Device {
    pub(crate) fn new(
        index: usize,
        total_bytes: u64,
        other_bytes: u64,
        pool: usize,
    ) -> std::io::Result<Self> {
        Ok(Self {
            bytes: DeviceBytes::new()?,
            total_bytes,
            taken_bytes: 0,
            other_bytes,
            primary: None,
            primary_references: 0,
            lost: None,
            default_pool: pool,
            current_pool: pool,
            next_address: first_address(index),
        })
    }

    pub(crate) fn free_bytes(&self) -> u64 {
        self.total_bytes.saturating_sub(self.taken_bytes + self.other_bytes)
    }
}

fn first_address(device: usize) -> u64 {
    FIRST_ADDRESS + to_u64(device) * DEVICE_SPAN
}

/// The offset of an address in its device's bytes.
pub(crate) fn offset_of(device: usize, address: u64) -> u64 {
    address - first_address(device)
}

/// A use of a part of an allocation.
#[derive(Debug)]
struct Access {
    start: u64,
    end: u64,
    is_write: bool,
    point: Point,
}

#[derive(Debug)]
pub(crate) struct Allocation {
    pub(crate) len_bytes: u64,
    pub(crate) device: usize,
    pub(crate) context: usize,
    /// `None` for plain memory.
    pub(crate) pool: Option<usize>,
    /// For pool memory: the point after which it may be used.
    pub(crate) allocated_at: Option<Point>,
    /// The point of its queued free.
    pub(crate) freed_at: Option<Point>,
    /// True if the pool has reused its bytes for an allocation ordered after the free.
    pub(crate) is_reclaimed: bool,
    pub(crate) uses: Clock,
    accesses: Vec<Access>,
}

impl Sim {
    /// Creates an allocation whose bytes are already counted.
    pub(crate) fn place_allocation(&mut self, mut allocation: Allocation) -> u64 {
        let device = &mut self.devices[allocation.device];
        let address = device.next_address.next_multiple_of(4096) + ALIGNMENT;
        device.next_address = address + allocation.len_bytes + GAP_BYTES;
        device.bytes.fill(POISON, offset_of(allocation.device, address), allocation.len_bytes);
        self.ledger.allocated.add(allocation.len_bytes);
        allocation.accesses.reserve(8);
        self.allocations.insert(address, allocation);
        address
    }

    /// `cuMemAlloc`.
    pub(crate) fn allocate_plain(&mut self, len_bytes: u64) -> Answer<u64> {
        let context = self.current()?;
        let device = self.device_of(context);
        if len_bytes == 0 {
            return Err(Code::INVALID_VALUE);
        }
        self.take(device, plain_bytes(len_bytes)?)?;
        Ok(self.place_allocation(new_allocation(len_bytes, device, context)))
    }

    /// Takes bytes from a device.
    pub(crate) fn take(&mut self, device: usize, bytes: u64) -> Answer {
        if bytes > self.devices[device].free_bytes() {
            return Err(Code::OUT_OF_MEMORY);
        }
        self.devices[device].taken_bytes += bytes;
        self.ledger.taken.add(bytes);
        Ok(())
    }

    pub(crate) fn give(&mut self, device: usize, bytes: u64) {
        self.devices[device].taken_bytes -= bytes;
        self.ledger.taken.subtract(bytes);
    }

    /// The allocation that contains a range.
    pub(crate) fn resolve(&mut self, address: u64, len_bytes: u64) -> Answer<u64> {
        let problem = match self.allocations.range(..=address).next_back() {
            Some((&start, allocation)) if address - start < allocation.len_bytes => {
                if allocation.freed_at.is_some() {
                    Some(("use_after_free", format!("{address:#x}+{len_bytes}: its free is queued already")))
                } else if len_bytes > allocation.len_bytes - (address - start) {
                    let text =
                        format!("{address:#x}+{len_bytes} runs over {start:#x}+{}", allocation.len_bytes);
                    Some(("out_of_bounds", text))
                } else {
                    return Ok(start);
                }
            }
            _ => None,
        };
        let (kind, text) = problem.unwrap_or_else(|| match self.freed.range(..=address).next_back() {
            Some((&start, &len)) if address - start < len => {
                ("use_after_free", format!("{address:#x}+{len_bytes} was freed"))
            }
            _ => ("out_of_bounds", format!("{address:#x}+{len_bytes} is in no allocation")),
        });
        self.violation(kind, text);
        Err(Code::INVALID_VALUE)
    }

    /// Checks that a stream may use a range of an allocation found by [`Self::resolve`], and
    /// records the use that will be queued at `point`.
    pub(crate) fn note_use(&mut self, start: u64, range: std::ops::Range<u64>, is_write: bool, point: Point) {
        let clock = self.clock_of(point.stream);
        let host = &self.host;
        let mut problems = Vec::new();
        let Some(allocation) = self.allocations.get_mut(&start) else { return };
        if let Some(allocated_at) = allocation.allocated_at.filter(|&at| !clock.covers(at)) {
            problems.push(("use_not_after_allocation", allocated_at));
        }
        let accesses = &mut allocation.accesses;
        let conflict = accesses.iter().find(|access| {
            access.start < range.end
                && range.start < access.end
                && (is_write || access.is_write)
                && !clock.covers(access.point)
        });
        if let Some(access) = conflict {
            problems.push(("unordered_access", access.point));
        }
        if accesses.len() >= ACCESSES_MAX {
            accesses.retain(|access| !host.covers(access.point));
        }
        accesses.push(Access { start: range.start, end: range.end, is_write, point });
        allocation.uses.raise(point);
        for (kind, other) in problems {
            let text = format!(
                "{:#x}..{:#x} by {} without order after {}",
                range.start,
                range.end,
                self.place(point),
                self.place(other)
            );
            self.violation(kind, text);
        }
    }

    /// The allocation to free.
    pub(crate) fn freeable(&mut self, address: u64) -> Answer<&mut Allocation> {
        let kind = match self.allocations.get(&address) {
            Some(allocation) if allocation.freed_at.is_none() => None,
            Some(_) => Some("double_free"),
            None if self.freed.contains_key(&address) => Some("double_free"),
            None => Some("bad_free"),
        };
        if let Some(kind) = kind {
            self.violation(kind, format!("{address:#x} is not the start of a live allocation"));
        }
        self.allocations.get_mut(&address).filter(|_| kind.is_none()).ok_or(Code::INVALID_VALUE)
    }

    /// `cuMemFree`.
    pub(crate) fn free_now(&mut self, address: u64) -> Answer {
        let allocation = self.freeable(address)?;
        let (uses, context) = (allocation.uses.clone(), allocation.context);
        if self.lost_of_context(context).is_none() {
            if let Some(point) = uses.points().find(|&point| !self.is_over(point)) {
                let text = format!("{address:#x} is freed while {} still uses it", self.place(point));
                self.violation("free_in_use", text);
            } else if let Some(point) = uses.first_beyond(&self.host) {
                let text =
                    format!("{address:#x} is freed, but the host has not waited for {}", self.place(point));
                self.violation("free_without_wait", text);
            }
            self.run_to(uses.points().collect())?;
        }
        self.end_allocation(address);
        Ok(())
    }

    /// Ends an allocation and returns its bytes to the pool or device.
    pub(crate) fn end_allocation(&mut self, address: u64) {
        let Some(allocation) = self.allocations.remove(&address) else { return };
        let Allocation { len_bytes, device, pool, is_reclaimed, .. } = allocation;
        self.devices[device].bytes.drop_range(offset_of(device, address), len_bytes);
        self.ledger.allocated.subtract(len_bytes);
        self.freed.insert(address, len_bytes);
        match pool {
            Some(pool) => self.return_to_pool(pool, len_bytes, is_reclaimed),
            None => self.give(device, len_bytes.next_multiple_of(GRAIN_BYTES)),
        }
    }
}

pub(crate) fn new_allocation(len_bytes: u64, device: usize, context: usize) -> Allocation {
    Allocation {
        len_bytes,
        device,
        context,
        pool: None,
        allocated_at: None,
        freed_at: None,
        is_reclaimed: false,
        uses: Clock::default(),
        accesses: Vec::new(),
    }
}

/// The memory used by a plain allocation.
fn plain_bytes(len_bytes: u64) -> Answer<u64> {
    len_bytes.checked_next_multiple_of(GRAIN_BYTES).ok_or(Code::OUT_OF_MEMORY)
}
