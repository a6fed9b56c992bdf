//! Text of `doctor`: a line for what is well, a block for what is not.

use super::escape::escape;
use super::terminal::Role;
use super::text::Look;
use crate::report::{Check, Report, State};

/// `loadcheck doctor`
pub(super) fn doctor(report: &Report, look: &Look) -> Vec<String> {
    let width = report.doctor.iter().map(|check| check.check.len()).max().unwrap_or(0);
    let mut lines: Vec<String> = report.doctor.iter().flat_map(|check| block(check, width, look)).collect();
    let count = |state| report.doctor.iter().filter(|check| check.state == state).count();
    lines.push(format!(
        "{} ok, {} limited, {} missing",
        count(State::Ok),
        count(State::Limited),
        count(State::Missing)
    ));
    lines
}

/// As it is spelt.
pub(super) fn word(state: State) -> &'static str {
    match state {
        State::Ok => "ok",
        State::Limited => "limited",
        State::Missing => "missing",
    }
}

fn block(check: &Check, width: usize, look: &Look) -> Vec<String> {
    let role = match check.state {
        State::Ok => Role::Good,
        State::Limited => Role::Warning,
        State::Missing => Role::Bad,
    };
    let state = look.paint.paint(role, &format!("{:<7}", word(check.state)));
    let start = format!("{state}  {:<width$}  ", check.check);
    let column = 9 + width + 2;
    let mut lines = wrapped(&start, column, &escape(&check.found), look.width);
    let indent = " ".repeat(column);
    if let Some(text) = &check.consequence {
        lines.extend(wrapped(&format!("{indent}so: "), column + 4, &escape(text), look.width));
    }
    if let Some(text) = &check.fix {
        let start = format!("{indent}{} ", look.paint.paint(Role::Strong, "fix:"));
        lines.extend(wrapped(&start, column + 5, &escape(text), look.width));
    }
    lines
}

/// `text` behind `start`, which takes `column` columns; what does not fit is continued below, from
/// that column on.
fn wrapped(start: &str, column: usize, text: &str, width: Option<u16>) -> Vec<String> {
    let room = width.map_or(usize::MAX, |width| usize::from(width).saturating_sub(column));
    let (mut lines, mut line, mut used) = (Vec::new(), start.to_owned(), 0);
    for word in text.split(' ') {
        let len = word.chars().count();
        if used > 0 && used + 1 + len > room {
            lines.push(std::mem::replace(&mut line, " ".repeat(column)));
            used = 0;
        }
        if used > 0 {
            line.push(' ');
            used += 1;
        }
        line.push_str(word);
        used += len;
    }
    lines.push(line);
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::terminal::Paint;
    use crate::report::CommandName;

    fn text(width: Option<u16>) -> Vec<String> {
        let mut report = Report::new(CommandName::Doctor);
        report.doctor = vec![
            Check::ok("swap", "none"),
            Check::limited("memlock", "8 MiB", "a ring of 64 MiB cannot be registered")
                .fix("ulimit -l unlimited"),
        ];
        doctor(&report, &Look { paint: Paint::NONE, width, verbose: false })
    }

    #[test]
    fn what_is_well_takes_a_line_and_what_is_not_a_block() {
        assert_eq!(
            text(None),
            [
                "ok       swap     none",
                "limited  memlock  8 MiB",
                "                  so: a ring of 64 MiB cannot be registered",
                "                  fix: ulimit -l unlimited",
                "1 ok, 1 limited, 0 missing",
            ]
        );
    }

    #[test]
    fn nothing_is_wider_than_the_terminal() {
        let lines = text(Some(40));
        assert!(lines.iter().all(|line| line.chars().count() <= 40), "{lines:?}");
        assert_eq!(lines[3], format!("{}cannot be", " ".repeat(22)));
    }
}
