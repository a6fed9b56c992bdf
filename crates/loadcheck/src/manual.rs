//! The reference pages of the manual, made from what they describe: docs/commands.md from the
//! command line, docs/json.md from the types of the reports. Tests alone use this file.

use std::collections::VecDeque;
use std::fmt::Write as _;

use clap::{Arg, Command, CommandFactory as _};
use serde_json::Value;

use crate::args::Cli;
use crate::exit::Exit;
use crate::report::Report;

/// From this many commands on an option is described once, in the part of its heading.
const SHARED_BY: usize = 3;

/// The first lines of a page.
fn head(title: &str, made_from: &str) -> String {
    format!(
        "<!-- Made from {made_from}: UPDATE_MANUAL=1 cargo test -p loadcheck --bin loadcheck manual -->\n\n# {title}\n\n"
    )
}

/// Text inside a table: one line, with nothing that Markdown takes for its own.
fn cell(text: &str) -> String {
    let parts: Vec<&str> = text.split("\n\n").map(str::trim).filter(|part| !part.is_empty()).collect();
    let text = parts.join("<br>").replace('\n', " ");
    let mut is_code = false;
    let mut cell = String::new();
    for one in text.replace("<br>", "\u{0}").chars() {
        is_code ^= one == '`';
        match one {
            '\u{0}' => cell.push_str("<br>"),
            '|' => cell.push_str("\\|"),
            '<' | '*' | '_' | '[' if !is_code => cell.extend(['\\', one]),
            other => cell.push(other),
        }
    }
    cell
}

/// An option or argument as it is written, such as `--budget SIZE`.
fn written(arg: &Arg) -> String {
    let values = arg.get_value_names().unwrap_or_default().join(" ").replace('|', "\\|");
    let Some(long) = arg.get_long() else { return format!("`{values}`") };
    let short = arg.get_short().map(|short| format!("`-{short}`, ")).unwrap_or_default();
    let takes = if arg.get_action().takes_values() { format!(" {values}") } else { String::new() };
    format!("{short}`--{long}{takes}`")
}

/// What an option does, with its default.
fn meaning(arg: &Arg) -> String {
    let short = arg.get_help().map(ToString::to_string).unwrap_or_default();
    let long = arg.get_long_help().map(ToString::to_string);
    let mut text = cell(&long.unwrap_or(short));
    let defaults: Vec<_> = arg.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    if !defaults.is_empty() && !arg.is_hide_default_value_set() && arg.get_action().takes_values() {
        let _ = write!(text, "<br>Default: `{}`", defaults.join(" "));
    }
    text
}

/// Paragraphs as they are, indented lines as code.
fn prose(text: &str) -> String {
    let mut page = String::new();
    for part in text.trim_end().split("\n\n") {
        let (title, lines) = part.split_once('\n').unwrap_or((part, ""));
        let (title, lines) = if part.starts_with("  ") { ("", part) } else { (title, lines) };
        if lines.starts_with("  ") {
            let title = if title.is_empty() { String::new() } else { format!("{title}\n\n") };
            let lines: Vec<&str> =
                lines.lines().map(|line| line.strip_prefix("  ").unwrap_or(line)).collect();
            let _ = write!(page, "{title}```text\n{}\n```\n\n", lines.join("\n"));
        } else {
            let _ = write!(page, "{part}\n\n");
        }
    }
    page
}

/// An option as the page has it. Two commands have the same one if all of it is equal.
#[derive(Clone, PartialEq)]
struct Entry {
    heading: Option<String>,
    name: String,
    row: String,
}

fn entries(command: &Command) -> Vec<Entry> {
    let is_own = |arg: &&Arg| !arg.is_hide_set() && !matches!(arg.get_id().as_str(), "help" | "version");
    let entry = |arg: &Arg| Entry {
        heading: arg.get_help_heading().map(|text| text.split(" (").next().unwrap_or(text).to_owned()),
        name: arg.get_long().unwrap_or_default().to_owned(),
        row: format!("| {} | {} |\n", written(arg), meaning(arg)),
    };
    command.get_arguments().filter(is_own).map(entry).collect()
}

fn table<'a>(entries: impl Iterator<Item = &'a Entry>) -> String {
    let rows: String = entries.map(|entry| entry.row.as_str()).collect();
    if rows.is_empty() { rows } else { format!("| option | meaning |\n|---|---|\n{rows}\n") }
}

/// The page of the command line.
fn commands_page() -> String {
    let mut cli = Cli::command();
    cli.build();
    let commands: Vec<&Command> = cli.get_subcommands().filter(|command| !command.is_hide_set()).collect();
    let all: Vec<Vec<Entry>> = commands.iter().map(|command| entries(command)).collect();
    let uses = |entry: &Entry| all.iter().filter(|entries| entries.contains(entry)).count();
    let mut shared: Vec<Entry> = Vec::new();
    for entry in all.iter().flatten().filter(|entry| entry.heading.is_some() && uses(entry) >= SHARED_BY) {
        if !shared.contains(entry) {
            shared.push(entry.clone());
        }
    }
    let mut headings: Vec<&str> = Vec::new();
    for heading in shared.iter().filter_map(|entry| entry.heading.as_deref()) {
        if !headings.contains(&heading) {
            headings.push(heading);
        }
    }

    let mut page = head("Commands", "the definition of the command line");
    page += "`loadcheck [run] SOURCE [OPTIONS]`, or `loadcheck COMMAND [OPTIONS]`. `loadcheck COMMAND -h` is the\nshort help, `--help` has all that is on this page, and `loadcheck man COMMAND` is a manual page.\n\n";
    page += &prose(&Exit::table());
    for (command, entries) in commands.iter().zip(&all) {
        let about = command.get_long_about().or(command.get_about()).map(ToString::to_string);
        let usage = Command::clone(command).render_usage().to_string();
        let usage = usage.trim_start_matches("Usage: ");
        let about = prose(&about.unwrap_or_default());
        let _ = write!(page, "## `loadcheck {}`\n\n{about}```text\n{usage}\n```\n\n", command.get_name());
        page += &table(entries.iter().filter(|entry| !shared.contains(entry)));
        for heading in &headings {
            let is_here =
                |entry: &&Entry| entry.heading.as_deref() == Some(heading) && shared.contains(entry);
            let names: Vec<String> =
                entries.iter().filter(is_here).map(|entry| format!("`--{}`", entry.name)).collect();
            if !names.is_empty() {
                let _ = writeln!(page, "- [{heading}](#{}): {}", heading.to_lowercase(), names.join(", "));
            }
        }
        page.push('\n');
    }
    page += "## Options of several commands\n\n";
    for heading in headings {
        let here = shared.iter().filter(|entry| entry.heading.as_deref() == Some(heading));
        let _ = write!(page, "### {heading}\n\n{}", table(here));
    }
    page.trim_end().to_owned() + "\n"
}

/// The type of a field, with links to the tables of objects.
fn type_of(schema: &Value, next: &mut Vec<String>) -> String {
    if let Some(name) = schema["$ref"].as_str().and_then(|path| path.rsplit('/').next()) {
        next.push(name.to_owned());
        return format!("[{name}](#{})", name.to_lowercase());
    }
    if let Some(all) = schema["anyOf"].as_array().or(schema["oneOf"].as_array()) {
        return all.iter().map(|one| type_of(one, next)).collect::<Vec<_>>().join(" or ");
    }
    let simple = |name: &Value| name.as_str().unwrap_or("any").to_owned();
    match &schema["type"] {
        Value::Array(names) => names.iter().map(simple).collect::<Vec<_>>().join(" or "),
        Value::String(name) if name == "array" => format!("list of {}", type_of(&schema["items"], next)),
        Value::String(name) if name == "object" && schema["additionalProperties"].is_object() => {
            format!("object of {}", type_of(&schema["additionalProperties"], next))
        }
        name => simple(name),
    }
}

fn described(schema: &Value) -> String {
    cell(schema["description"].as_str().unwrap_or_default())
}

/// The values of an enumeration, as one of its lines lists them.
fn constants(schema: &Value) -> Option<String> {
    let values = schema["enum"].as_array().cloned().or_else(|| Some(vec![schema.get("const")?.clone()]))?;
    let values = values.iter().map(|value| format!("`{}`", value.as_str().unwrap_or_default()));
    Some(values.collect::<Vec<_>>().join(", "))
}

/// The fields of an object, or the values of an enumeration.
fn fields(schema: &Value, next: &mut Vec<String>) -> String {
    let (mut values, mut fields) = (String::new(), String::new());
    let alternatives = schema["oneOf"].as_array().or(schema["anyOf"].as_array());
    let is_enumeration = schema["enum"].is_array().then_some(schema);
    for one in alternatives.into_iter().flatten().chain(is_enumeration) {
        let value = constants(one).unwrap_or_else(|| type_of(one, next));
        let _ = writeln!(values, "| {value} | {} |", described(one));
    }
    for (name, field) in schema["properties"].as_object().into_iter().flatten() {
        let _ = writeln!(fields, "| `{name}` | {} | {} |", type_of(field, next), described(field));
    }
    match (values.is_empty(), fields.is_empty()) {
        (false, _) => format!("| value | meaning |\n|---|---|\n{values}"),
        (_, false) => format!("| field | type | meaning |\n|---|---|---|\n{fields}"),
        _ => type_of(schema, next),
    }
}

/// The page of the JSON.
fn json_page() -> String {
    let schema = serde_json::to_value(schemars::schema_for!(Report)).expect("a schema is JSON");
    let mut page = head("JSON", "the types of the reports");
    page += "What `--json` prints. Every command prints a [Report](#report). Units are the last part of a name\n(`_bytes`, `_ns`). A value that was not measured is `null`, never 0. The same as a JSON schema:\n[loadcheck.schema.json](loadcheck.schema.json).\n\n";
    let mut next = Vec::new();
    let _ = write!(page, "## Report\n\n{}\n\n{}\n", described(&schema), fields(&schema, &mut next));
    let mut done: Vec<String> = Vec::new();
    let mut waiting: VecDeque<String> = next.into();
    while let Some(name) = waiting.pop_front() {
        if done.contains(&name) {
            continue;
        }
        let (schema, mut next) = (&schema["$defs"][&name], Vec::new());
        let _ = write!(page, "## {name}\n\n{}\n\n{}\n", described(schema), fields(schema, &mut next));
        waiting.extend(next);
        done.push(name);
    }
    page.trim_end().to_owned() + "\n"
}

/// Run with `UPDATE_MANUAL=1` after an option or a field was added.
#[test]
fn reference_pages_are_up_to_date() {
    for (name, page) in [("commands.md", commands_page()), ("json.md", json_page())] {
        let path = format!("{}/../../docs/{name}", env!("CARGO_MANIFEST_DIR"));
        if std::env::var_os("UPDATE_MANUAL").is_some() {
            std::fs::write(&path, &page).unwrap();
        }
        let published = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(published == page, "run the test with UPDATE_MANUAL=1 and commit {path}");
    }
}

#[test]
fn cells_are_one_line_that_markdown_leaves_alone() {
    assert_eq!(cell("a <b>\nc\n\n`d_<e>` | f_g*"), "a \\<b> c<br>`d_<e>` \\| f\\_g\\*");
}
