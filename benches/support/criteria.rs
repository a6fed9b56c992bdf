//! How long every bench with criterion may take: short, so that all of them together stay within
//! three minutes.

use std::time::Duration;

use criterion::Criterion;

/// A harness that takes about a second and a half for each bench.
pub(crate) fn quick() -> Criterion {
    Criterion::default()
        .sample_size(15)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
        .configure_from_args()
}
