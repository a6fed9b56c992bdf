//! Copies and fills: checks when they are queued, and their execution.

use super::copy::{Copy, DeviceRange, HostRange};
use super::host::{self, HostKind, Sum};
use super::scheduler::Kind;
use super::{Sim, to_u64};
use crate::code::{Answer, Code};
use crate::faults::WORK;
use crate::ledger::Injected;

/// Pageable sources up to this size are read when the copy is queued (driver API, "API
/// synchronization behavior"); the rest makes the call wait.
const STAGED_BYTES_MAX: usize = 64 << 10;

impl Sim {
    fn device_range(&mut self, address: u64, len: usize) -> Answer<DeviceRange> {
        let start = self.resolve(address, to_u64(len))?;
        let device = self.allocations[&start].device;
        Ok(DeviceRange { address, len_bytes: to_u64(len), start, device })
    }

    fn host_range(&mut self, start: usize, len: usize) -> Answer<HostRange> {
        let kind = self.host_kind(start, len)?;
        Ok(HostRange { start, len, kind })
    }

    /// `cuMemcpyHtoDAsync`.
    pub(crate) fn copy_to_device(&mut self, target: u64, source: usize, len: usize, stream: usize) -> Answer {
        let stream = self.usable_stream(stream)?;
        if len == 0 {
            return Ok(());
        }
        let target = self.device_range(target, len)?;
        let source = self.host_range(source, len)?;
        let is_staged = source.kind == HostKind::Pageable && !self.config.is_pageable_late;
        let copy = if is_staged && len <= STAGED_BYTES_MAX {
            let mut bytes = Vec::with_capacity(len);
            let read = host::read(source.start, len, |_, part| {
                bytes.extend_from_slice(part);
                Ok(())
            });
            read.map_err(|_| self.missing(source))?;
            Copy::Staged { bytes, target }
        } else {
            let sum = host::sum(source.start, len).map_err(|_| self.missing(source))?;
            Copy::ToDevice { source, target, sum }
        };
        self.queue_copy(stream, copy, source.kind == HostKind::Pageable, is_staged && len > STAGED_BYTES_MAX)
    }

    /// `cuMemcpyDtoHAsync`. With a pageable target it returns when the copy is over.
    pub(crate) fn copy_to_host(&mut self, target: usize, source: u64, len: usize, stream: usize) -> Answer {
        let stream = self.usable_stream(stream)?;
        if len == 0 {
            return Ok(());
        }
        let source = self.device_range(source, len)?;
        let target = self.host_range(target, len)?;
        let is_pageable = target.kind == HostKind::Pageable;
        let waits = is_pageable && !self.config.is_pageable_late;
        self.queue_copy(stream, Copy::ToHost { source, target }, is_pageable, waits)
    }

    /// `cuMemcpyDtoDAsync`.
    pub(crate) fn copy_on_device(&mut self, target: u64, source: u64, len: usize, stream: usize) -> Answer {
        let stream = self.usable_stream(stream)?;
        if len == 0 {
            return Ok(());
        }
        let target = self.device_range(target, len)?;
        let source = self.device_range(source, len)?;
        if target.address < source.span().end && source.address < target.span().end {
            let text = format!("{:#x}+{len} to {:#x} overlap", source.address, target.address);
            self.violation("overlapping_copy", text);
        }
        self.queue_copy(stream, Copy::OnDevice { source, target }, false, false)
    }

    /// `cuMemsetD8Async`.
    pub(crate) fn fill(&mut self, target: u64, value: u8, len: usize, stream: usize) -> Answer {
        let stream = self.usable_stream(stream)?;
        if len == 0 {
            return Ok(());
        }
        let target = self.device_range(target, len)?;
        self.queue_copy(stream, Copy::Fill { target, value }, false, false)
    }

    fn queue_copy(&mut self, stream: usize, copy: Copy, is_pageable: bool, waits: bool) -> Answer {
        let point = self.next_point(stream);
        for (range, is_write) in [(copy.read_range(), false), (copy.written_range(), true)] {
            if let Some(range) = range {
                self.note_use(range.start, range.span(), is_write, point);
            }
        }
        if let Some(kind) = copy.host_kind() {
            self.note_pinned_use(kind, point);
        }
        self.ledger.copy_queued(copy.direction(), copy.len_bytes(), is_pageable);
        let queued = self.enqueue(stream, Kind::Copy(Box::new(copy)))?;
        if waits { self.run_to(vec![queued]) } else { Ok(()) }
    }

    fn missing(&mut self, range: HostRange) -> Code {
        self.violation("host_range", format!("{:#x}+{} is not mapped", range.start, range.len));
        Code::INVALID_VALUE
    }

    /// Runs a copy. An error loses the context.
    pub(crate) fn execute(&mut self, copy: Copy) -> Answer {
        let (number, fault) = self.faults.count(WORK);
        if let Some(fault) = fault {
            self.ledger.injected.push(Injected { function: WORK, number, code: fault.code.0 });
            self.ledger.copy_over(copy.direction(), copy.len_bytes(), false);
            return Err(fault.code);
        }
        let (direction, len_bytes) = (copy.direction(), copy.len_bytes());
        let done = self.move_bytes(copy);
        self.ledger.copy_over(direction, len_bytes, done.is_ok());
        done
    }

    fn move_bytes(&mut self, copy: Copy) -> Answer {
        let ranges = [copy.read_range(), copy.written_range()];
        if let Some(range) =
            ranges.into_iter().flatten().find(|range| !self.allocations.contains_key(&range.start))
        {
            self.violation(
                "use_after_free",
                format!("{:#x} was freed while a copy was queued", range.address),
            );
            return Err(Code::ILLEGAL_ADDRESS);
        }
        if let Some(kind) = copy.host_kind()
            && !self.is_still_pinned(kind)
        {
            self.violation("unpinned_in_flight", format!("{kind:?} was unpinned while a copy was queued"));
            return Err(Code::ILLEGAL_ADDRESS);
        }
        match copy {
            Copy::ToDevice { source, target, sum } => self.move_to_device(source, target, sum),
            Copy::Staged { bytes, target } => {
                self.devices[target.device].bytes.write(&bytes, target.offset());
                Ok(())
            }
            Copy::ToHost { source, target } => {
                let bytes = &self.devices[source.device].bytes;
                let written = host::write(target.start, bytes, source.offset(), target.len);
                written.map_err(|_| self.unmapped(target))
            }
            Copy::OnDevice { source, target } => {
                self.move_on_device(source, target);
                Ok(())
            }
            Copy::Fill { target, value } => {
                self.devices[target.device].bytes.fill(value, target.offset(), target.len_bytes);
                Ok(())
            }
        }
    }

    fn unmapped(&mut self, range: HostRange) -> Code {
        let text = format!("{:#x}+{} was unmapped while a copy was queued", range.start, range.len);
        self.violation("unmapped_in_flight", text);
        Code::ILLEGAL_ADDRESS
    }

    fn move_to_device(&mut self, source: HostRange, target: DeviceRange, sum: u64) -> Answer {
        let bytes = &self.devices[target.device].bytes;
        let mut sum_now = Sum::new();
        let moved = host::read(source.start, source.len, |at, part| {
            sum_now.add(part);
            bytes.write(part, target.offset() + to_u64(at));
            Ok(())
        });
        moved.map_err(|_| self.unmapped(source))?;
        if sum_now.value() != sum {
            let text = format!("{:#x}+{} was written to while its copy was queued", source.start, source.len);
            self.violation("source_changed", text);
        }
        Ok(())
    }

    fn move_on_device(&self, source: DeviceRange, target: DeviceRange) {
        let mut buffer = vec![0; 256 << 10];
        let mut done = 0;
        while done < source.len_bytes {
            let part = (source.len_bytes - done).min(to_u64(buffer.len()));
            let part_bytes = &mut buffer[..usize::try_from(part).expect("not above the buffer's length")];
            self.devices[source.device].bytes.read(part_bytes, source.offset() + done);
            self.devices[target.device].bytes.write(part_bytes, target.offset() + done);
            done += part;
        }
    }
}
