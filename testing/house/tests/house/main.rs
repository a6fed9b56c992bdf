//! The sources keep their order, their sizes and their widths.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod api;
mod links;
mod order;
mod shared_build;
mod sizes;
mod unsafe_code;
mod widths;

/// Every library and program of the workspace.
fn roots() -> Vec<house::tree::Root> {
    let roots = house::tree::roots(house::repository());
    assert!(roots.len() > 10, "the sources are there");
    roots
}

/// Compares a committed file with what it should hold, or writes it if the variable is set.
fn compare(path: &std::path::Path, wanted: &str, variable: &str) {
    if std::env::var_os(variable).is_some() {
        std::fs::write(path, wanted).unwrap();
    }
    let known = std::fs::read_to_string(path).unwrap_or_default();
    let differs = || {
        let (known, wanted): (Vec<&str>, Vec<&str>) = (known.lines().collect(), wanted.lines().collect());
        let gone = known.iter().filter(|line| !wanted.contains(line)).map(|line| format!("- {line}"));
        let new = wanted.iter().filter(|line| !known.contains(line)).map(|line| format!("+ {line}"));
        gone.chain(new).take(40).collect::<Vec<_>>().join("\n")
    };
    assert!(known == wanted, "{}\n{variable}=1 writes {}: review and commit it", differs(), path.display());
}
