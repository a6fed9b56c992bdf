//! A simulated CUDA driver.
//!
//! The library exports the part of the CUDA driver API that loading needs, and a part of NVML, on
//! host memory. Work that is queued runs as late and as far out of step as CUDA allows, so that a
//! program that forgets to wait gets wrong bytes; and misuse that a real driver answers with
//! silence is written down. `README.md` has the settings and the report.
//!
//! ```text
//! api, nvml    the exported functions: arguments in, a code out
//! sim          the one state behind a lock; each call is counted, refused on demand, then run
//! context      which context is current on which thread
//! scheduler    streams, events, and who runs what when
//! execute      what a queued copy does when its turn comes
//! clock        what is ordered before what
//! memory       allocations, their bytes, their order; pool: memory that a pool holds; host: pinned memory
//! faults       calls that fail on demand
//! ledger       violations and sums; report: both as text, at exit
//! ```

mod api;
mod clock;
mod code;
mod config;
mod context;
mod execute;
mod faults;
mod host;
mod ledger;
mod memory;
mod nvml;
mod pool;
mod random;
mod report;
mod scheduler;
mod sim;
