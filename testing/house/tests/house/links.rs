//! Links of README and manual lead somewhere, and every page of the manual is in its contents.

use std::fs;
use std::path::Path;

use house::links::{Link, anchors, links};
use house::{repository, tree};

/// Why a link leads nowhere.
fn fault(page: &Path, link: &Link) -> Option<String> {
    let target = if link.path.is_empty() { page.to_owned() } else { page.parent()?.join(&link.path) };
    if !target.exists() {
        return Some(format!("no file {}", link.path));
    }
    let anchor = link.anchor.as_ref().filter(|_| target.extension().is_some_and(|end| end == "md"))?;
    let is_there = anchors(&fs::read_to_string(&target).unwrap()).contains(anchor);
    (!is_there).then(|| format!("no heading #{anchor} in {}", target.display()))
}

#[test]
fn links_lead_to_files_and_headings() {
    let (mut faults, mut count) = (Vec::new(), 0);
    for page in tree::files(repository(), ".md") {
        for link in links(&fs::read_to_string(&page).unwrap()) {
            count += 1;
            let name = page.strip_prefix(repository()).unwrap().display();
            faults.extend(fault(&page, &link).map(|why| format!("{name}:{}: {why}", link.line)));
        }
    }
    assert!(count > 150, "{count} links were found");
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn every_page_is_in_the_contents() {
    let docs = repository().join("docs");
    let contents = links(&fs::read_to_string(docs.join("SUMMARY.md")).unwrap());
    for page in tree::files(&docs, ".md") {
        let name = page.strip_prefix(&docs).unwrap().to_string_lossy().into_owned();
        let times = contents.iter().filter(|link| link.path == name).count();
        assert_eq!(times, usize::from(name != "SUMMARY.md"), "{name} in SUMMARY.md");
    }
}

#[test]
fn links_and_headings_are_found_outside_code() {
    let text = "# One `two`\n## A, b-c_d?\n## A, b-c_d?\n```\n# no\n[no](x.md)\n```\n[x](a.md#one) [y](#b) [z](https://x)";
    assert_eq!(anchors(text), ["one-two", "a-b-c_d", "a-b-c_d-1"]);
    let link = |path: &str, anchor: &str| Link { line: 8, path: path.into(), anchor: Some(anchor.into()) };
    assert_eq!(links(text), [link("a.md", "one"), link("", "b")]);
}
