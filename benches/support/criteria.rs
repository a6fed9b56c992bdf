//! Time limits of criterion benches, so that all of them together take less than three minutes.

use std::time::Duration;

use criterion::Criterion;

/// A harness that takes about 1.5 s per bench.
pub(crate) fn quick() -> Criterion {
    Criterion::default()
        .sample_size(15)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
        .configure_from_args()
}
