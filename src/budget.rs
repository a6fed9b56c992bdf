//! The host budget: one number, and the named reservations that are taken from it.
//!
//! All host memory of the loader whose size depends on something (ring, metadata, mapped windows,
//! scratch) is reserved here by name before a tensor byte is read, and given back when its
//! [`Reservation`] is dropped. A reservation cannot grow. Resident layers, which belong to the
//! caller, are not in the budget, nor are thread stacks, the slack of the allocator and a device
//! context.

use std::sync::{Arc, Mutex, PoisonError};

use crate::units::HumanBytes;

/// A reservation that does not fit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "host budget of {} is too small: {what} needs {}, {} are free",
    HumanBytes(*limit_bytes), HumanBytes(*needed_bytes), HumanBytes(*free_bytes)
)]
#[non_exhaustive]
pub struct BudgetError {
    /// The name of the refused reservation.
    pub what: &'static str,
    /// Its size in bytes.
    pub needed_bytes: u64,
    /// Bytes that were free.
    pub free_bytes: u64,
    /// The whole budget.
    pub limit_bytes: u64,
}

/// A host-memory budget in bytes. Clones share one account.
#[derive(Debug, Clone)]
pub struct MemoryBudget {
    account: Arc<Account>,
}

#[derive(Debug)]
struct Account {
    limit_bytes: u64,
    ledger: Mutex<Ledger>,
}

#[derive(Debug, Default)]
struct Ledger {
    used_bytes: u64,
    peak_bytes: u64,
}

impl MemoryBudget {
    /// A budget of `limit_bytes`, nothing of it used.
    #[must_use]
    pub fn new(limit_bytes: u64) -> Self {
        Self { account: Arc::new(Account { limit_bytes, ledger: Mutex::default() }) }
    }

    /// Takes `bytes` from the budget until the reservation is dropped.
    ///
    /// # Errors
    /// [`BudgetError`] if less than `bytes` is free; the budget is then unchanged.
    pub fn reserve(&self, what: &'static str, bytes: u64) -> Result<Reservation, BudgetError> {
        let mut ledger = self.account.lock();
        let free_bytes = self.account.limit_bytes - ledger.used_bytes;
        if bytes > free_bytes {
            let limit_bytes = self.account.limit_bytes;
            return Err(BudgetError { what, needed_bytes: bytes, free_bytes, limit_bytes });
        }
        ledger.used_bytes += bytes;
        ledger.peak_bytes = ledger.peak_bytes.max(ledger.used_bytes);
        drop(ledger);
        Ok(Reservation { account: Arc::clone(&self.account), what, bytes })
    }

    /// The whole budget, in bytes.
    #[must_use]
    pub fn limit_bytes(&self) -> u64 {
        self.account.limit_bytes
    }

    /// Bytes that are reserved now.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.account.lock().used_bytes
    }

    /// The most bytes that were ever reserved at once.
    #[must_use]
    pub fn peak_bytes(&self) -> u64 {
        self.account.lock().peak_bytes
    }
}

impl Account {
    fn lock(&self) -> std::sync::MutexGuard<'_, Ledger> {
        // Every update leaves the ledger consistent, so a panic elsewhere does not spoil it.
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes taken from a [`MemoryBudget`], given back on drop.
#[derive(Debug)]
#[must_use = "a reservation that is dropped at once protects nothing"]
pub struct Reservation {
    account: Arc<Account>,
    what: &'static str,
    bytes: u64,
}

impl Reservation {
    /// The name of the reservation.
    #[must_use]
    pub fn what(&self) -> &'static str {
        self.what
    }

    /// How many bytes are held.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.account.lock().used_bytes -= self.bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exhaust_fail_release_succeed() {
        let budget = MemoryBudget::new(10);
        let ring = budget.reserve("ring", 8).unwrap();
        let refused = budget.reserve("metadata", 3).unwrap_err();
        assert_eq!((refused.needed_bytes, refused.free_bytes, refused.limit_bytes), (3, 2, 10));
        assert_eq!(budget.used_bytes(), 8);
        drop(ring);
        let again = budget.reserve("metadata", 10).unwrap();
        assert_eq!((again.what(), again.bytes(), budget.peak_bytes()), ("metadata", 10, 10));
        drop(again);
        assert_eq!(budget.used_bytes(), 0);
    }
}
