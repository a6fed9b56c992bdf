//! A simulated CUDA driver.
//!
//! The library exports the part of the CUDA driver API that loading needs, and a part of NVML, on
//! host memory. Queued work runs as late and as far out of order as CUDA allows, so a program that
//! forgets to wait gets wrong bytes. Misuse that a real driver ignores is recorded. `README.md`
//! lists the settings and the report.
//!
//! ```text
//! api, nvml    the exported functions: arguments in, a code out
//! sim          the state behind a lock; counts each call, injects faults, runs it
//!   context    the current context of each thread
//!   scheduler  streams, events, and the execution order of queued work
//!   copy       queued copies and fills; execute: their checks and execution
//!   memory     allocations, their bytes and uses; pool: memory pools; host: pinned memory
//! clock        vector clocks: the order of work
//! faults       injected failures
//! ledger       violations and counters; report: both as text, at exit
//! ```

mod api;
mod clock;
mod code;
mod config;
mod faults;
mod ledger;
mod nvml;
mod random;
mod report;
mod sim;
