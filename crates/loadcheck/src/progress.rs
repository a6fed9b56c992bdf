//! How far a load or a conversion is, on stderr: a bar on a terminal, a line every 10 % elsewhere,
//! JSON lines for programs.

use std::borrow::Cow;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::json;

use crate::numbers::{bytes, count, grouped, rate, seconds, to_f64};
use crate::output::escape::escape_and_cut;
use crate::output::terminal::{ProgressMode, is_ascii_locale};
use crate::output::to_stderr;

/// Characters of a layer's name on a line, at most.
const LAYER_CHARACTERS_MAX: usize = 80;
/// The longest silence of the line modes.
const SILENCE_MAX: Duration = Duration::from_secs(10);
/// When nothing arrives for so long, that is said: a disk or a network that hangs looks like
/// nothing else.
const STANDSTILL_MIN: Duration = Duration::from_secs(3);

/// How many files there are, and shall be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Files {
    /// There already.
    pub(crate) done: u64,
    /// In all.
    pub(crate) total: u64,
}

/// The work in progress.
#[derive(Clone, Copy, Debug)]
enum What<'a> {
    /// This layer is loaded.
    Layer(&'a str),
    /// So many files are written.
    Files(Files),
}

/// Shows how far a load or a conversion is. Dropping it removes a bar.
#[derive(Debug)]
pub(crate) struct Progress {
    shown: Shown,
    label: String,
    start: Instant,
    /// Bytes that have arrived, and when the last of them did; from the first update on.
    arrived: Option<(u64, Instant)>,
    /// This standstill was told of.
    is_told: bool,
    /// Bytes that were there at the first update.
    first_bytes: Option<u64>,
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
        Self { shown, label: label.to_owned(), start, arrived: None, is_told: false, first_bytes: None }
    }

    /// Shows that `done_bytes` of `total_bytes` have arrived and what is being loaded.
    pub(crate) fn update(&mut self, done_bytes: u64, total_bytes: u64, layer: &str) {
        self.show(done_bytes, total_bytes, What::Layer(layer));
    }

    /// Shows that `done_bytes` of `total_bytes` have been read, and how many files are written.
    pub(crate) fn update_files(&mut self, done_bytes: u64, total_bytes: u64, files: Files) {
        self.show(done_bytes, total_bytes, What::Files(files));
    }

    /// A file is there: because it `is_new`, or since an earlier run. Only programs are told.
    pub(crate) fn file(&self, name: &str, bytes: u64, is_new: bool) {
        if matches!(self.shown, Shown::Lines { json: true, .. }) {
            let state = if is_new { "written" } else { "kept" };
            to_stderr(&json!({"file": {"name": name, "bytes": bytes, "state": state}}).to_string());
        }
    }

    /// For how long nothing has arrived, if that is worth a word.
    fn standstill(&mut self, done_bytes: u64) -> Option<Duration> {
        let (bytes, since) = *self.arrived.get_or_insert_with(|| (done_bytes, Instant::now()));
        if bytes != done_bytes {
            (self.arrived, self.is_told) = (Some((done_bytes, Instant::now())), false);
            return None;
        }
        Some(since.elapsed()).filter(|standstill| *standstill >= STANDSTILL_MIN)
    }

    fn show(&mut self, done_bytes: u64, total_bytes: u64, what: What<'_>) {
        let standstill = match what {
            What::Layer(_) if done_bytes < total_bytes => self.standstill(done_bytes),
            // Files are written in between, and what is loaded is compared.
            _ => None,
        };
        // Files of an earlier run were not read by this one.
        let first_bytes = match what {
            What::Files(_) => *self.first_bytes.get_or_insert(done_bytes),
            What::Layer(_) => 0,
        };
        let is_news = standstill.is_some() && !std::mem::replace(&mut self.is_told, true);
        match &mut self.shown {
            Shown::Nothing => {}
            Shown::Bar(bar) => {
                let bar = bar.get_or_insert_with(|| new_bar(&self.label, total_bytes));
                bar.set_length(total_bytes);
                bar.set_position(done_bytes);
                let speed = speed(
                    done_bytes - first_bytes.min(done_bytes),
                    total_bytes - done_bytes.min(total_bytes),
                    self.start.elapsed(),
                );
                bar.set_message(match standstill {
                    Some(standstill) => format!("{}, {}", standing_still(standstill), what.text()),
                    None => format!("{speed}{}", what.text()),
                });
            }
            Shown::Lines { json, tenth, last } => {
                let share = u128::from(done_bytes) * 10 / u128::from(total_bytes.max(1));
                let now_tenth = u64::try_from(share).unwrap_or(10).min(10);
                if now_tenth <= *tenth && last.elapsed() < SILENCE_MAX && !is_news {
                    return;
                }
                (*tenth, *last) = (now_tenth, Instant::now());
                let times = Times { elapsed: self.start.elapsed(), standstill };
                let line = if *json {
                    json_line(&self.label, done_bytes, total_bytes, what, times)
                } else {
                    plain_line(&self.label, done_bytes, total_bytes, what, times)
                };
                to_stderr(&line);
            }
        }
    }
}

impl What<'_> {
    /// For people.
    fn text(&self) -> Cow<'_, str> {
        match self {
            Self::Layer(layer) => escape_and_cut(layer, LAYER_CHARACTERS_MAX),
            Self::Files(files) => format!("{}/{}", grouped(files.done), count(files.total, "file")).into(),
        }
    }
}

/// How long it has gone on, and for how long nothing has arrived if that is worth a word.
#[derive(Clone, Copy, Debug)]
struct Times {
    elapsed: Duration,
    standstill: Option<Duration>,
}

/// For people.
fn standing_still(standstill: Duration) -> String {
    format!("nothing arrived for {} s", standstill.as_secs())
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Shown::Bar(Some(bar)) = &self.shown {
            bar.finish_and_clear();
        }
    }
}

fn new_bar(label: &str, total_bytes: u64) -> ProgressBar {
    let template = "{prefix}{bar:25} {binary_bytes:>9} of {binary_total_bytes}  {wide_msg}";
    let style = ProgressStyle::with_template(template).expect("the template is a constant that tests build");
    let bar = ProgressBar::with_draw_target(Some(total_bytes), ProgressDrawTarget::stderr_with_hz(10));
    bar.set_style(style.progress_chars(if is_ascii_locale() { "=> " } else { "█▉▊▋▌▍▎▏ " }));
    bar.set_prefix(if label.is_empty() { String::new() } else { format!("{label}  ") });
    bar
}

/// `1.2 GiB/s  eta 3 s  `: the mean since the start, which no burst can move far.
fn speed(done_bytes: u64, left_bytes: u64, elapsed: Duration) -> String {
    let elapsed = elapsed.as_secs_f64();
    let Some(rate) = rate(done_bytes, elapsed).filter(|_| done_bytes > 0) else { return String::new() };
    let left = elapsed * to_f64(left_bytes) / to_f64(done_bytes);
    format!("{rate}  eta {}  ", seconds(left))
}

fn plain_line(label: &str, done_bytes: u64, total_bytes: u64, what: What<'_>, times: Times) -> String {
    let elapsed = times.elapsed;
    let standstill = times.standstill.map(|standstill| format!("  {}", standing_still(standstill)));
    let percent = u128::from(done_bytes) * 100 / u128::from(total_bytes.max(1));
    let speed = rate(done_bytes, elapsed.as_secs_f64()).map(|rate| format!("  {rate}")).unwrap_or_default();
    format!(
        "loadcheck: {}{percent:>3} %  {} of {}  {}{speed}{}  {}",
        if label.is_empty() { String::new() } else { format!("{label}  ") },
        bytes(Some(done_bytes)),
        bytes(Some(total_bytes)),
        seconds(elapsed.as_secs_f64()),
        standstill.unwrap_or_default(),
        what.text()
    )
    .trim_end()
    .to_owned()
}

fn json_line(label: &str, done_bytes: u64, total_bytes: u64, what: What<'_>, times: Times) -> String {
    let mut progress = json!({"stage": label, "done_bytes": done_bytes, "total_bytes": total_bytes});
    match what {
        What::Layer(layer) => progress["layer"] = layer.into(),
        What::Files(files) => {
            progress["files_done"] = files.done.into();
            progress["files_total"] = files.total.into();
        }
    }
    progress["seconds"] = times.elapsed.as_secs_f64().into();
    if let Some(standstill) = times.standstill {
        progress["standstill_seconds"] = standstill.as_secs_f64().into();
    }
    json!({"progress": progress}).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_of_a_bar_is_the_mean() {
        let second = Duration::from_secs(1);
        assert_eq!(speed(1 << 30, 2 << 30, second), "1.00 GiB/s  eta 2 s  ");
        assert_eq!((speed(0, 9, second), speed(9, 0, Duration::ZERO)), (String::new(), String::new()));
    }

    fn after(seconds: u64) -> Times {
        Times { elapsed: Duration::from_secs(seconds), standstill: None }
    }

    #[test]
    fn the_bar_can_be_built() {
        assert_eq!(new_bar("run 1 of 2", 7).prefix(), "run 1 of 2  ");
    }

    #[test]
    fn lines_say_how_far() {
        let line = plain_line("", 50 << 20, 100 << 20, What::Layer("a\u{1b}"), after(1));
        assert_eq!(line, "loadcheck:  50 %  50 MiB of 100 MiB  1 s  50 MiB/s  a\\u{1b}");
        let line: serde_json::Value =
            serde_json::from_str(&json_line("x", 1, 2, What::Layer("l"), after(0))).unwrap();
        assert_eq!(line["progress"]["done_bytes"], 1);
        assert!(line["progress"]["standstill_seconds"].is_null());
        assert!(plain_line("", 0, 0, What::Layer(""), after(0)).contains("  0 %"));
        assert!(plain_line("", 1, 2, What::Layer(&"x".repeat(64 << 10)), after(0)).len() < 200);
    }

    #[test]
    fn a_standstill_is_said() {
        let times = Times { standstill: Some(Duration::from_millis(4500)), ..after(5) };
        let line = plain_line("", 50 << 20, 100 << 20, What::Layer("a"), times);
        assert_eq!(line, "loadcheck:  50 %  50 MiB of 100 MiB  5 s  10 MiB/s  nothing arrived for 4 s  a");
        let line: serde_json::Value =
            serde_json::from_str(&json_line("", 1, 2, What::Layer("a"), times)).unwrap();
        assert_eq!(line["progress"]["standstill_seconds"], 4.5);
    }

    #[test]
    fn conversions_count_files() {
        let files = What::Files(Files { done: 3, total: 27 });
        let line = plain_line("", 50 << 20, 100 << 20, files, after(1));
        assert_eq!(line, "loadcheck:  50 %  50 MiB of 100 MiB  1 s  50 MiB/s  3/27 files");
        let line: serde_json::Value = serde_json::from_str(&json_line("", 1, 2, files, after(0))).unwrap();
        assert_eq!(
            (line["progress"]["files_done"].as_u64(), line["progress"]["files_total"].as_u64()),
            (Some(3), Some(27))
        );
        assert!(line["progress"]["layer"].is_null());
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
