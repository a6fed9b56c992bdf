#![allow(clippy::as_conversions, clippy::cast_precision_loss, reason = "rounded figures")]
//! Repeats a piece of work until its rate is known, within the remaining time.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// The effort and the deadline of measurements.
pub(crate) struct Effort {
    /// One short pass each, with rough figures, to test that everything works.
    pub(crate) quick: bool,
    /// The deadline for starting new rows.
    pub(crate) deadline: Instant,
}

impl Effort {
    /// Either of two values, by [`Self::quick`].
    pub(crate) fn pick<T>(&self, full: T, quick: T) -> T {
        if self.quick { quick } else { full }
    }

    /// True if it is too late for another row.
    pub(crate) fn is_over(&self) -> bool {
        Instant::now() >= self.deadline
    }

    /// Times repeated passes: one uncounted pass, then at least `least` passes and 0.15 s.
    ///
    /// # Errors
    /// Of the first pass that fails.
    pub(crate) fn repeat<E>(
        &self,
        least: usize,
        mut pass: impl FnMut() -> Result<(), E>,
    ) -> Result<Times, E> {
        pass()?;
        let least = self.pick(least, 1);
        let until = Instant::now() + self.pick(Duration::from_millis(150), Duration::ZERO);
        let mut seconds = Vec::new();
        while seconds.len() < least || (Instant::now() < until && seconds.len() < 200) {
            let start = Instant::now();
            pass()?;
            seconds.push(start.elapsed().as_secs_f64());
        }
        Ok(Times { seconds })
    }
}

/// The duration of each pass.
pub(crate) struct Times {
    seconds: Vec<f64>,
}

impl Times {
    /// One pass timed elsewhere.
    pub(crate) fn once(time: Duration) -> Self {
        Self { seconds: vec![time.as_secs_f64()] }
    }

    /// Seconds of the median pass.
    pub(crate) fn median(&self) -> f64 {
        let mut sorted = self.seconds.clone();
        sorted.sort_by(f64::total_cmp);
        sorted[sorted.len() / 2]
    }

    /// The rate of passes that moved `bytes` each; GB are 10^9 bytes.
    pub(crate) fn rate(&self, bytes: usize) -> Value {
        let rate = |seconds: f64| bytes as f64 / seconds.max(1e-9) / 1e9;
        let slowest = self.seconds.iter().copied().fold(0.0, f64::max);
        let fastest = self.seconds.iter().copied().fold(f64::INFINITY, f64::min);
        json!({
            "bytes": bytes,
            "seconds": self.median(),
            "gb_per_s": rate(self.median()),
            "gb_per_s_min": rate(slowest),
            "gb_per_s_max": rate(fastest),
            "passes": self.seconds.len(),
        })
    }
}

/// Adds the fields of `more` to `row`, or an error instead.
pub(crate) fn row<E: std::fmt::Display>(mut row: Value, more: Result<Value, E>) -> Value {
    let more = more.unwrap_or_else(|error| json!({ "error": error.to_string() }));
    if let (Value::Object(row), Value::Object(more)) = (&mut row, more) {
        row.extend(more);
    }
    row
}
