//! Links of Markdown files, and the headings that they may point to.

/// A link to a file of this repository or to a heading, and the number of its line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// The line, from 1.
    pub line: usize,
    /// The file, relative to that of the link; empty for the same file.
    pub path: String,
    /// The heading, as an address has it.
    pub anchor: Option<String>,
}

/// Lines outside blocks of code, by number.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut is_code = false;
    (1..).zip(text.lines()).filter(move |(_, line)| {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        !is_code && !is_fence
    })
}

/// The links of a file, without those to other machines.
#[must_use]
pub fn links(text: &str) -> Vec<Link> {
    let mut found = Vec::new();
    for (line, words) in prose(text) {
        let targets = words.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        for target in targets.filter(|target| !target.contains("://") && !target.starts_with("mailto:")) {
            let (path, anchor) =
                target.split_once('#').map_or((target, None), |(path, anchor)| (path, Some(anchor)));
            found.push(Link { line, path: path.to_owned(), anchor: anchor.map(str::to_owned) });
        }
    }
    found
}

/// The addresses of the headings of a file, as mdBook and code forges make them.
#[must_use]
pub fn anchors(text: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    for (_, line) in prose(text).filter(|(_, line)| line.starts_with('#')) {
        let title = line.trim_start_matches('#').trim().to_lowercase().replace(' ', "-");
        let plain: String =
            title.chars().filter(|one| one.is_alphanumeric() || matches!(one, '-' | '_')).collect();
        let again = (1..).map(|times| format!("{plain}-{times}"));
        let free = [plain.clone()].into_iter().chain(again).find(|name| !found.contains(name));
        found.extend(free);
    }
    found
}
