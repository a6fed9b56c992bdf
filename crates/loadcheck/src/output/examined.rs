//! `doctor`: a line for each check that is well, and for the others what follows and how to change
//! it.

use super::document::{Document, Part, Table, Text, View, name, role};
use super::terminal::Role;
use crate::report::{Check, Report, State};

/// The document of `doctor`: on a page a table.
pub(super) fn document(report: &Report, view: View) -> Document {
    let mut document = Document::default();
    if view.is_page {
        document.table(table(&report.doctor));
        return document;
    }
    let width = report.doctor.iter().map(|check| check.check.len()).max().unwrap_or(0);
    report.doctor.iter().for_each(|check| add_block(check, width, &mut document));
    let count = |state| report.doctor.iter().filter(|check| check.state == state).count();
    let (limited, missing) = (count(State::Limited), count(State::Missing));
    document.line(format!("{} ok, {limited} limited, {missing} missing", count(State::Ok)));
    document
}

fn table(checks: &[Check]) -> Table {
    Table::of(checks)
        .left("", |check| word(check.state))
        .left("check", |check| check.check.clone())
        .left("found", |check| check.found.clone())
        .left("consequence", |check| check.consequence.clone())
        .left("fix", |check| check.fix.clone().map(name))
        .table()
}

fn word(state: State) -> &'static str {
    match state {
        State::Ok => "ok",
        State::Limited => "limited",
        State::Missing => "missing",
    }
}

fn add_block(check: &Check, width: usize, document: &mut Document) {
    let state = match check.state {
        State::Ok => Role::Good,
        State::Limited => Role::Warning,
        State::Missing => Role::Bad,
    };
    let state = role(state, format!("{:<7}", word(check.state)));
    document.push(Part::Wrapped(state + format!("  {:<width$}  ", check.check), check.found.clone()));
    let indent = Text::from(" ".repeat(9 + width + 2));
    let consequence = check.consequence.clone();
    document.extend(consequence.map(|text| Part::Wrapped(indent.clone() + "so: ", text)));
    let fix = check.fix.clone();
    document.extend(fix.map(|text| Part::Wrapped(indent + role(Role::Strong, "fix:") + " ", text)));
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
        let text = crate::output::text::draw(&document(&report, View::default()), Paint::NONE, width);
        text.lines().map(str::to_owned).collect()
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
