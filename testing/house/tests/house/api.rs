//! The public items of each library are those of the committed lists: a change of the interface is
//! seen in a review. After a change on purpose: `UPDATE_API=1 cargo test -p house api`.

use house::{public, repository};

/// Libraries that others build on.
const LIBRARIES: [&str; 6] = [
    ". lib",
    "bindings/dlpack lib",
    "crates/fit lib",
    "crates/probe lib",
    "crates/synth lib",
    "crates/system lib",
];

#[test]
fn public_items_are_those_of_the_lists() {
    let roots = super::roots();
    for library in LIBRARIES {
        let root = roots.iter().find(|root| root.name == library).unwrap();
        let name = match library.trim_end_matches(" lib") {
            "." => "onelayer",
            folder => folder.rsplit('/').next().unwrap(),
        };
        let path = repository().join(format!("testing/house/api/{name}.txt"));
        let items = public::items(root);
        assert!(items.len() > 20, "{library} has public items");
        super::compare(&path, &format!("{}\n", items.join("\n")), "UPDATE_API");
    }
}
