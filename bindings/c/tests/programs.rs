//! C and C++ programs that use the installed library: right bytes, misuse returns a status, no
//! leaks.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;

use onelayer_testing::{small_decoder, write_sharded};
use support::{
    can_compile, compile, compile_with, expected, fixture, is_installed, lines, package, pkg_config, prefix,
    run, run_in_valgrind, source, succeed,
};

const FIXTURES: [&str; 5] = ["gemma2", "gpt2", "llama", "llama_sharded", "qwen2_moe"];

#[test]
fn programs_get_the_bytes_of_the_reference() {
    if !can_compile() {
        return;
    }
    for program in [compile(&source("checksums.c")), compile(&source("engine.cpp"))] {
        for name in FIXTURES {
            let expected = expected(&fixture(name));
            assert!(expected.len() > 10, "{name} has tensors");
            let found = succeed(run(&program).arg(fixture(name)));
            assert_eq!(lines(&found), expected, "{}, {name}", program.display());
        }
    }
}

#[test]
fn every_type_arrives_in_c() {
    if !can_compile() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (mut header, mut bytes) = (BTreeMap::new(), Vec::new());
    let types = [("BOOL", 8), ("F4", 4), ("F6_E2M3", 6), ("F6_E3M2", 6), ("U8", 8), ("I8", 8)]
        .into_iter()
        .chain([("F8_E5M2", 8), ("F8_E4M3", 8), ("F8_E8M0", 8), ("F8_E4M3FNUZ", 8), ("F8_E5M2FNUZ", 8)])
        .chain([("I16", 16), ("U16", 16), ("F16", 16), ("BF16", 16), ("I32", 32), ("U32", 32), ("F32", 32)])
        .chain([("C64", 64), ("F64", 64), ("I64", 64), ("U64", 64)]);
    for (dtype, bits) in types {
        let start = bytes.len();
        // Neighbouring bytes of the file always differ.
        bytes.extend((0..40 * bits / 8).map(|place| u8::try_from((start + place) % 251).unwrap()));
        let tensor =
            serde_json::json!({"dtype": dtype, "shape": [5, 8], "data_offsets": [start, bytes.len()]});
        header.insert(dtype, tensor);
    }
    let path = folder.path().join("model.safetensors");
    let header = serde_json::to_vec(&header).unwrap();
    let len = u64::try_from(header.len()).unwrap().to_le_bytes();
    fs::write(&path, [&len[..], &header, &bytes].concat()).unwrap();
    let found = succeed(run(&compile(&source("checksums.c"))).arg(&path));
    let found = lines(&found);
    assert_eq!(found, expected(folder.path()));
    assert_eq!(found.len(), 22, "every type of the format");
}

#[test]
fn ranks_have_parts_that_are_the_whole_together() {
    if !can_compile() {
        return;
    }
    let printed = succeed(run(&compile(&source("ranks.cpp"))).arg(fixture("llama"))).stdout;
    // Nine norms are whole; all other tensors are divided.
    assert_eq!(String::from_utf8(printed).unwrap(), "30 of 39 tensors are divided\n");
}

#[test]
fn misuse_is_a_status() {
    if !can_compile() {
        return;
    }
    succeed(run(&compile(&source("misuse.c"))).arg(fixture("llama")));
}

#[test]
fn programs_misuse_and_leak_no_memory() {
    if !can_compile() || !is_installed("valgrind") {
        return;
    }
    let checksums = compile_with(&source("checksums.c"), "-valgrind", &pkg_config(&["--cflags", "--libs"]));
    for name in ["checksums.c", "engine.cpp", "misuse.c"] {
        let program = compile_with(&source(name), "-valgrind", &pkg_config(&["--cflags", "--libs"]));
        succeed(run_in_valgrind(&program).arg(fixture("llama")));
    }
    // The check works: it finds a tensor that is not deleted.
    let leaky = run_in_valgrind(&checksums).arg(fixture("llama")).arg("leak").output().unwrap();
    let said = String::from_utf8_lossy(&leaky.stderr);
    assert_eq!(leaky.status.code(), Some(9), "{said}");
    assert!(said.contains("definitely lost") && said.contains("ol_layer_tensor"), "{said}");
}

/// The memory promise, by the kernel's high-water mark: at most the budget and 16 MiB, and one
/// layer on the host.
#[test]
fn memory_grows_by_no_more_than_the_budget_allows() {
    if !can_compile() {
        return;
    }
    // Twelve layers of slightly more than 14 MiB.
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    write_sharded(folder.path(), &small_decoder(12, 2 << 20));
    let program = compile(&source("growth.c"));
    for (device, layer_mib) in [("none", 0), ("host", 15)] {
        for budget_mib in [5, 24] {
            let printed =
                succeed(run(&program).arg(folder.path()).arg(budget_mib.to_string()).arg(device)).stdout;
            let growth_bytes: u64 = String::from_utf8(printed).unwrap().trim().parse().unwrap();
            let limit_bytes = (budget_mib + layer_mib + 16) << 20;
            assert!(
                growth_bytes <= limit_bytes,
                "{device}, {budget_mib} MiB: {growth_bytes} of {limit_bytes}"
            );
            // The measurement works: one layer is visible in it.
            assert!(
                growth_bytes >= (layer_mib << 20) / 15 * 14,
                "{device}, {budget_mib} MiB: {growth_bytes}"
            );
        }
    }
}

#[test]
fn ten_thousand_tensors_from_four_threads_and_one_at_the_end() {
    if !can_compile() {
        return;
    }
    let program = compile(&source("cycles.cpp"));
    let check = |mut command: Command| {
        let printed = succeed(command.arg(fixture("llama"))).stdout;
        assert_eq!(String::from_utf8(printed).unwrap(), "10000 deleted\n");
    };
    check(run(&program));
    if is_installed("valgrind") {
        // The last tensor is still reachable, so it is no leak.
        check(run_in_valgrind(&program));
    }
}

#[test]
fn the_example_of_the_documentation_runs() {
    if !can_compile() {
        return;
    }
    let printed = succeed(run(&compile(&package().join("examples/print_layers.c"))).arg(fixture("llama")));
    let printed = String::from_utf8(printed.stdout).unwrap();
    assert!(printed.starts_with("model.embed_tokens\n"), "{printed}");
    assert!(printed.contains("model.norm.weight: type 4 of 16 bits, shape 64"), "{printed}");
}

#[test]
fn a_static_library_is_enough() {
    if !can_compile() {
        return;
    }
    let mut flags = pkg_config(&["--cflags"]);
    flags.push(prefix().join("lib/libonelayer.a").to_str().unwrap().to_owned());
    let libraries = pkg_config(&["--static", "--libs"]);
    flags.extend(libraries.into_iter().filter(|flag| flag != "-lonelayer" && !flag.starts_with("-L")));
    let program = compile_with(&source("checksums.c"), "-static", &flags);
    // It does not need the shared library.
    let found = succeed(Command::new(&program).env_remove("LD_LIBRARY_PATH").arg(fixture("llama")));
    assert_eq!(lines(&found), expected(&fixture("llama")));
}

#[test]
fn cmake_finds_the_library() {
    if !can_compile() || !is_installed("cmake") {
        return;
    }
    let build = tempfile::tempdir().unwrap();
    let mut configure = Command::new("cmake");
    configure.arg("-S").arg(package().join("tests/programs")).arg("-B").arg(build.path());
    succeed(configure.arg(format!("-DCMAKE_PREFIX_PATH={}", prefix().display())));
    succeed(Command::new("cmake").arg("--build").arg(build.path()));
    for program in ["checksums", "checksums_static", "engine"] {
        let found = succeed(Command::new(build.path().join(program)).arg(fixture("gpt2")));
        assert_eq!(lines(&found), expected(&fixture("gpt2")), "{program}");
    }
}

/// The first code block of a language in docs/c.md that contains `text`.
fn documented(language: &str, containing: &str) -> String {
    let text = fs::read_to_string(package().join("../../docs/c.md")).unwrap();
    let fence = format!("```{language}\n");
    let blocks = text.split(&fence).skip(1);
    let mut blocks = blocks.map(|rest| rest.split("```").next().unwrap().to_owned());
    blocks
        .find(|block| block.contains(containing))
        .unwrap_or_else(|| panic!("no {language} with {containing}"))
}

#[test]
fn the_documented_lines_build_programs() {
    if !can_compile() || !is_installed("cmake") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let in_folder = |line: &str| {
        let mut command = Command::new("sh");
        command.args(["-euc", line]).current_dir(folder.path());
        command.env("PKG_CONFIG_PATH", prefix().join("lib/pkgconfig")).env("PREFIX", prefix());
        succeed(&mut command);
    };
    fs::copy(package().join("examples/print_layers.c"), folder.path().join("print_layers.c")).unwrap();
    in_folder(&documented("sh", "$(pkg-config"));
    succeed(run(&folder.path().join("print_layers")).arg(fixture("gpt2")));
    fs::write(folder.path().join("CMakeLists.txt"), documented("cmake", "find_package")).unwrap();
    in_folder(&documented("sh", "cmake -S"));
    succeed(Command::new(folder.path().join("build/print_layers")).arg(fixture("gpt2")));
}
