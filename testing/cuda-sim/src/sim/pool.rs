//! Stream-ordered memory pools.
//!
//! A pool takes memory from its device in fixed units. It returns unused memory above its release
//! threshold when the host waits, and when it is trimmed or destroyed. Memory with a queued free
//! counts as used until the free has run, except for allocations ordered after the free.

use super::Sim;
use super::memory::{Allocation, GRAIN_BYTES, new_allocation};
use super::scheduler::Kind;
use crate::code::{Answer, Code};
use crate::ledger::Gauge;

#[derive(Debug)]
pub(crate) struct Pool {
    pub(crate) device: usize,
    pub(crate) is_default: bool,
    /// Destroyed by the program, but kept until all its memory is freed.
    pub(crate) is_destroyed: bool,
    pub(crate) threshold_bytes: u64,
    pub(crate) used: Gauge,
    pub(crate) reserved: Gauge,
    /// Reuse attributes 1 to 3: stored without effect.
    pub(crate) reuse: [u32; 3],
}

impl Pool {
    pub(crate) fn new(device: usize, is_default: bool) -> Self {
        Self {
            device,
            is_default,
            is_destroyed: false,
            threshold_bytes: 0,
            used: Gauge::default(),
            reserved: Gauge::default(),
            reuse: [1; 3],
        }
    }
}

impl Sim {
    pub(crate) fn new_pool(&mut self, device: usize, is_default: bool) -> usize {
        let pool = self.new_handle("pool");
        self.pools.insert(pool, Pool::new(device, is_default));
        pool
    }

    /// The pool of a handle.
    pub(crate) fn pool(&mut self, handle: usize) -> Answer<&mut Pool> {
        if self.pools.get(&handle).is_none_or(|pool| pool.is_destroyed) {
            self.unknown_handle("pool", handle);
            return Err(Code::INVALID_VALUE);
        }
        self.pools.get_mut(&handle).ok_or(Code::INVALID_VALUE)
    }

    /// `cuMemAllocFromPoolAsync`.
    pub(crate) fn allocate_from_pool(&mut self, len_bytes: u64, pool: usize, stream: usize) -> Answer<u64> {
        let context = self.current()?;
        let stream = self.usable_stream(stream)?;
        if !self.config.has_pools {
            return Err(Code::NOT_SUPPORTED);
        }
        let device = self.pool(pool)?.device;
        if len_bytes == 0 || device != self.device_of(context) {
            return Err(Code::INVALID_VALUE);
        }
        // Drivers allocate in steps of 512 bytes and reserve larger units.
        self.reserve(pool, len_bytes, stream)?;
        let point = self.enqueue(stream, Kind::Mark)?;
        let mut allocation = new_allocation(len_bytes, device, context);
        allocation.pool = Some(pool);
        allocation.allocated_at = Some(point);
        Ok(self.place_allocation(allocation))
    }

    /// Counts bytes as used, and takes missing memory from the device.
    fn reserve(&mut self, handle: usize, len_bytes: u64, stream: usize) -> Answer {
        let Some(pool) = self.pools.get(&handle) else { return Err(Code::INVALID_VALUE) };
        if len_bytes > pool.reserved.now.saturating_sub(pool.used.now) {
            self.reclaim(handle, stream);
        }
        let Some(pool) = self.pools.get(&handle) else { return Err(Code::INVALID_VALUE) };
        let wanted = pool.used.now.checked_add(len_bytes).ok_or(Code::OUT_OF_MEMORY)?;
        let missing = wanted.saturating_sub(pool.reserved.now);
        let missing = missing.checked_next_multiple_of(GRAIN_BYTES).ok_or(Code::OUT_OF_MEMORY)?;
        let device = pool.device;
        self.take(device, missing)?;
        let pool = self.pools.get_mut(&handle).ok_or(Code::INVALID_VALUE)?;
        pool.reserved.add(missing);
        pool.used.add(len_bytes);
        Ok(())
    }

    /// Reuses memory whose free is ordered before the next work in the stream.
    fn reclaim(&mut self, handle: usize, stream: usize) {
        let clock = self.clock_of(stream);
        let mut bytes = 0;
        for allocation in self.allocations.values_mut() {
            let is_ordered = allocation.freed_at.is_some_and(|point| clock.covers(point));
            if allocation.pool == Some(handle) && is_ordered && !allocation.is_reclaimed {
                allocation.is_reclaimed = true;
                bytes += allocation.len_bytes;
            }
        }
        if let Some(pool) = self.pools.get_mut(&handle) {
            pool.used.subtract(bytes);
        }
    }

    /// `cuMemFreeAsync`.
    pub(crate) fn free_async(&mut self, address: u64, stream: usize) -> Answer {
        let stream = self.usable_stream(stream)?;
        let clock = self.clock_of(stream);
        let allocation = self.freeable(address)?;
        if allocation.pool.is_none() {
            self.violation("bad_free", format!("{address:#x} is plain memory, freed in a stream"));
            return Err(Code::INVALID_VALUE);
        }
        let before = allocation.allocated_at.filter(|&point| !clock.covers(point));
        let before = before.or_else(|| allocation.uses.first_beyond(&clock));
        let context = allocation.context;
        // Nothing runs in a lost context, so order does not matter.
        if let Some(point) = before
            && self.lost_of_context(context).is_none()
        {
            let text = format!("{address:#x} is freed without order after {}", self.place(point));
            self.violation("free_not_ordered", text);
        }
        let point = self.enqueue(stream, Kind::Free { address })?;
        if let Some(allocation) = self.allocations.get_mut(&address) {
            allocation.freed_at = Some(point);
        }
        Ok(())
    }

    /// Marks pool memory as unused.
    pub(crate) fn return_to_pool(&mut self, handle: usize, len_bytes: u64, is_reclaimed: bool) {
        let Some(pool) = self.pools.get_mut(&handle) else { return };
        if !is_reclaimed {
            pool.used.subtract(len_bytes);
        }
        if pool.is_destroyed {
            self.shrink_pool(handle, 0);
        }
    }

    /// Returns unused memory of a pool above `keep` bytes.
    pub(crate) fn shrink_pool(&mut self, handle: usize, keep_bytes: u64) {
        let Some(pool) = self.pools.get_mut(&handle) else { return };
        let keep = pool.used.now.next_multiple_of(GRAIN_BYTES).max(keep_bytes).min(pool.reserved.now);
        let back = pool.reserved.now - keep;
        pool.reserved.subtract(back);
        let device = pool.device;
        let is_over = pool.is_destroyed && pool.used.now == 0;
        self.give(device, back);
        let has_memory = self.allocations.values().any(|allocation| allocation.pool == Some(handle));
        if is_over && !has_memory {
            self.pools.remove(&handle);
        }
    }

    /// Called when the host has waited: pools return memory above their threshold.
    pub(crate) fn settle_pools(&mut self) {
        let pools: Vec<(usize, u64)> =
            self.pools.iter().map(|(&handle, pool)| (handle, pool.threshold_bytes)).collect();
        for (handle, threshold) in pools {
            self.shrink_pool(handle, threshold);
        }
    }

    /// `cuMemPoolDestroy`. Memory with a queued free is allowed (driver API); unfreed memory is
    /// not.
    pub(crate) fn destroy_pool(&mut self, handle: usize) -> Answer {
        if self.pool(handle)?.is_default {
            return Err(Code::INVALID_VALUE);
        }
        let lives =
            |allocation: &&Allocation| allocation.pool == Some(handle) && allocation.freed_at.is_none();
        let live = self.allocations.values().filter(lives).count();
        if live > 0 {
            self.violation("pool_destroyed_in_use", format!("a pool with {live} live allocations"));
        }
        let pool = self.pool(handle)?;
        pool.is_destroyed = true;
        pool.threshold_bytes = 0;
        self.shrink_pool(handle, 0);
        Ok(())
    }
}
