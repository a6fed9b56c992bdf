//! How far a load is, on stderr: a bar on a terminal, a line every 10 % elsewhere, JSON lines for programs.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::json;

use crate::output::escape::escape_and_cut;
use crate::output::numbers::{bytes, rate, seconds};
use crate::output::terminal::ProgressMode;
use crate::output::to_stderr;

/// Characters of a layer's name on a line, at most.
const LAYER_CHARACTERS_MAX: usize = 80;
/// The longest silence of the line modes.
const SILENCE_MAX: Duration = Duration::from_secs(10);

/// Shows how far a load is. Dropping it removes a bar.
#[derive(Debug)]
pub(crate) struct Progress {
    shown: Shown,
    label: String,
    start: Instant,
}

#[derive(Debug)]
enum Shown {
    /// Nothing is drawn before the first update: a bar of nothing looks full.
    Bar(Option<ProgressBar>),
    Lines {
        json: bool,
        tenth: u64,
        last: Instant,
    },
    Nothing,
}

impl Progress {
    /// Begins. `label` says what is going on, such as `run 2 of 5`.
    pub(crate) fn start(mode: ProgressMode, label: &str) -> Self {
        let start = Instant::now();
        let shown = match mode {
            ProgressMode::Bar => Shown::Bar(None),
            ProgressMode::Plain => Shown::Lines { json: false, tenth: 0, last: start },
            ProgressMode::Json => Shown::Lines { json: true, tenth: 0, last: start },
            ProgressMode::Never => Shown::Nothing,
        };
        Self { shown, label: label.to_owned(), start }
    }

    /// Shows that `done_bytes` of `total_bytes` have arrived and what is being loaded.
    pub(crate) fn update(&mut self, done_bytes: u64, total_bytes: u64, layer: &str) {
        match &mut self.shown {
            Shown::Nothing => {}
            Shown::Bar(bar) => {
                let bar = bar.get_or_insert_with(|| new_bar(&self.label, total_bytes));
                bar.set_length(total_bytes);
                bar.set_position(done_bytes);
                bar.set_message(escape_and_cut(layer, LAYER_CHARACTERS_MAX).into_owned());
            }
            Shown::Lines { json, tenth, last } => {
                let share = u128::from(done_bytes) * 10 / u128::from(total_bytes.max(1));
                let now_tenth = u64::try_from(share).unwrap_or(10).min(10);
                if now_tenth <= *tenth && last.elapsed() < SILENCE_MAX {
                    return;
                }
                (*tenth, *last) = (now_tenth, Instant::now());
                let line = if *json {
                    json_line(&self.label, done_bytes, total_bytes, layer, self.start.elapsed())
                } else {
                    plain_line(&self.label, done_bytes, total_bytes, layer, self.start.elapsed())
                };
                to_stderr(&line);
            }
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Shown::Bar(Some(bar)) = &self.shown {
            bar.finish_and_clear();
        }
    }
}

fn new_bar(label: &str, total_bytes: u64) -> ProgressBar {
    let template = "{prefix}{bar:25} {binary_bytes:>9} of {binary_total_bytes}  {binary_bytes_per_sec}  eta {eta}  {wide_msg}";
    let style = ProgressStyle::with_template(template).expect("the template is a constant that tests build");
    let bar = ProgressBar::with_draw_target(Some(total_bytes), ProgressDrawTarget::stderr_with_hz(10));
    bar.set_style(style.progress_chars("█▉▊▋▌▍▎▏ "));
    bar.set_prefix(if label.is_empty() { String::new() } else { format!("{label}  ") });
    bar
}

fn plain_line(label: &str, done_bytes: u64, total_bytes: u64, layer: &str, elapsed: Duration) -> String {
    let percent = u128::from(done_bytes) * 100 / u128::from(total_bytes.max(1));
    let speed = rate(done_bytes, elapsed.as_secs_f64()).map(|rate| format!("  {rate}")).unwrap_or_default();
    format!(
        "loadcheck: {}{percent:>3} %  {} of {}  {}{speed}  {}",
        if label.is_empty() { String::new() } else { format!("{label}  ") },
        bytes(Some(done_bytes)),
        bytes(Some(total_bytes)),
        seconds(elapsed.as_secs_f64()),
        escape_and_cut(layer, LAYER_CHARACTERS_MAX)
    )
    .trim_end()
    .to_owned()
}

fn json_line(label: &str, done_bytes: u64, total_bytes: u64, layer: &str, elapsed: Duration) -> String {
    json!({"progress": {
        "stage": label, "done_bytes": done_bytes, "total_bytes": total_bytes, "layer": layer,
        "seconds": elapsed.as_secs_f64(),
    }})
    .to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_can_be_built() {
        assert_eq!(new_bar("run 1 of 2", 7).prefix(), "run 1 of 2  ");
    }

    #[test]
    fn lines_say_how_far() {
        let line = plain_line("", 50 << 20, 100 << 20, "a\u{1b}", Duration::from_secs(1));
        assert_eq!(line, "loadcheck:  50 %  50 MiB of 100 MiB  1 s  50 MiB/s  a\\u{1b}");
        let line: serde_json::Value =
            serde_json::from_str(&json_line("x", 1, 2, "l", Duration::ZERO)).unwrap();
        assert_eq!(line["progress"]["done_bytes"], 1);
        assert!(plain_line("", 0, 0, "", Duration::ZERO).contains("  0 %"));
        assert!(plain_line("", 1, 2, &"x".repeat(64 << 10), Duration::ZERO).len() < 200);
    }

    #[test]
    fn a_line_a_tenth() {
        let mut progress = Progress::start(ProgressMode::Plain, "");
        for percent in 0..=100 {
            progress.update(percent, 100, "");
            let Shown::Lines { tenth, .. } = progress.shown else { panic!("lines were asked for") };
            assert_eq!(tenth, percent / 10);
        }
    }
}
