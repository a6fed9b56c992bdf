//! The public interface: the header matches the sources and works with DLPack's own header, and
//! only
//! `ol_` symbols are exported.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod support;

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use support::{can_compile, is_installed, package, pkg_config, prefix, run, succeed};

#[test]
fn the_header_is_what_the_sources_say() {
    let mut written = Vec::new();
    cbindgen::generate(package()).unwrap().write(&mut written);
    let kept = fs::read(package().join("include/onelayer.h")).unwrap();
    assert!(kept == written, "write it: cargo run -p onelayer-capi --example header");
}

/// Functions declared in the header.
fn declared() -> BTreeSet<String> {
    let header = fs::read_to_string(package().join("include/onelayer.h")).unwrap();
    let is_code = |line: &&str| !line.trim_start().starts_with("//");
    let words = header
        .lines()
        .filter(is_code)
        .flat_map(|line| line.split(|c: char| !c.is_alphanumeric() && c != '_' && c != '('));
    words
        .filter_map(|word| word.split_once('('))
        .map(|(name, _)| name.to_owned())
        .filter(|name| name.starts_with("ol_"))
        .collect()
}

#[test]
fn the_library_exports_what_the_header_declares_and_nothing_else() {
    if !is_installed("nm") {
        return;
    }
    let library = prefix().join("lib/libonelayer.so");
    let listed =
        succeed(Command::new("nm").args(["--dynamic", "--defined-only", "--format=posix"]).arg(library));
    let exported: BTreeSet<String> = String::from_utf8(listed.stdout)
        .unwrap()
        .lines()
        .filter_map(|line| line.split_whitespace().next().map(str::to_owned))
        .collect();
    assert!(exported.len() > 25, "{exported:?}");
    assert_eq!(exported, declared());
}

/// A program may include DLPack's own header before or after this one.
#[test]
fn the_header_stands_beside_that_of_dlpack() {
    if !can_compile() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let own = fs::read_to_string(package().join("include/onelayer_dlpack.h")).unwrap();
    // A stand-in for dlpack.h: its guard, versions and structures.
    let (start, end) = ("#define DLPACK_DLPACK_H_", "#endif /* DLPACK_DLPACK_H_ */");
    let body = &own[own.find(start).unwrap()..own.find(end).unwrap()];
    fs::create_dir(folder.path().join("dlpack")).unwrap();
    let other = format!("#ifndef DLPACK_DLPACK_H_\n{body}\n#define IS_OF_DLPACK 1\n#endif\n");
    fs::write(folder.path().join("dlpack/dlpack.h"), other).unwrap();
    let program = "int main(void) { DLManagedTensorVersioned *tensor = 0; ol_layer_tensor(0, 0, 0, &tensor); return IS; }";
    let (theirs, ours) = ("#include <dlpack/dlpack.h>\n", "#include <onelayer.h>\n");
    for (name, text) in [
        ("before", format!("{theirs}{ours}#define IS !IS_OF_DLPACK\n{program}\n")),
        (
            "after",
            format!("{ours}{theirs}#ifdef IS_OF_DLPACK\n#error twice\n#endif\n#define IS 0\n{program}\n"),
        ),
    ] {
        for (extension, is_c) in [("c", true), ("cpp", false)] {
            let source = folder.path().join(format!("{name}.{extension}"));
            fs::write(&source, &text).unwrap();
            let mut flags = pkg_config(&["--cflags", "--libs"]);
            flags.push(format!("-I{}", folder.path().display()));
            let program = support::compile_with(&source, "", &flags);
            assert!(succeed(&mut run(&program)).status.success(), "{name}, C: {is_c}");
        }
    }
    // A too old version is refused.
    let old = "#define DLPACK_DLPACK_H_\n#define DLPACK_VERSION 80\n";
    let source = folder.path().join("old.c");
    fs::write(&source, format!("{old}{ours}int main(void) {{ return 0; }}\n")).unwrap();
    let refused = Command::new("gcc").args(pkg_config(&["--cflags"])).arg(&source).output().unwrap();
    assert!(String::from_utf8_lossy(&refused.stderr).contains("needs version 1 of dlpack.h"));
}

/// The layout of the structures in C and Rust. Sizes must not change for existing programs.
#[test]
fn structures_keep_their_first_layout() {
    if !can_compile() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("sizes.c");
    let program = "#include <onelayer.h>\n#include <stdio.h>\n#include <stddef.h>\nint main(void) {\n\
        printf(\"%zu %zu %zu %zu\", sizeof(ol_options), sizeof(ol_tensor), sizeof(ol_report), sizeof(ol_indices));\n\
        printf(\" %zu %zu\", offsetof(ol_options, ranks_mode), sizeof(DLManagedTensorVersioned));\n\
        return (int)ol_abi_version() - OL_ABI_VERSION;\n}\n";
    fs::write(&source, program).unwrap();
    let compiled = support::compile_with(&source, "", &pkg_config(&["--cflags", "--libs"]));
    let printed = succeed(&mut run(&compiled)).stdout;
    assert_eq!(String::from_utf8(printed).unwrap(), "104 64 88 16 100 80");
}

/// Options that would put the libraries in another folder are refused.
#[test]
fn install_refuses_what_would_install_another_library() {
    let unused = package().join("no-such-place");
    for words in [&["--target", "x"][..], &["--profile=dev"], &["--target-dir", "x"], &["-r"]] {
        let output = Command::new(package().join("install"))
            .arg("--prefix")
            .arg(&unused)
            .arg("--")
            .args(words)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(2), "{words:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(words[0]), "{words:?}");
        assert!(!unused.exists());
    }
}
