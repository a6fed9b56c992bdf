//! PyTorch and GGUF files through the program: names of Hugging Face models, and hostile files.
#![allow(clippy::unwrap_used, clippy::as_conversions, reason = "a test that cannot go on panics")]

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::gguf_corpus;
use crate::support::{assert_code, run, stderr, stdout};
use crate::torch_corpus::{self, Verdict};
use onelayer_testing::gguf_file::{GgufFile, Value};
use onelayer_testing::sample;

/// A GGUF file of a model with two blocks.
fn gguf(arch: &str) -> Vec<u8> {
    GgufFile::new()
        .key("general.architecture", Value::text(arch))
        .key(&format!("{arch}.attention.head_count"), Value::u32(2))
        .tensor("token_embd.weight", &[32, 10], 8, 340)
        .tensor("blk.0.attn_q.weight", &[32, 8], 8, 272)
        .tensor("blk.1.attn_q.weight", &[32, 8], 8, 272)
        .tensor("output_norm.weight", &[32], 0, 128)
        .bytes()
}

#[test]
fn names_of_gguf_files_become_those_of_the_model() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path();
    fs::write(path.join("model.gguf"), gguf("llama")).unwrap();
    assert_code(&run(path, "convert model.gguf out --names hf --dtype f32 --verify"), 0);
    let manifest = fs::read_to_string(path.join("out/onelayer.manifest.json")).unwrap();
    for part in ["model.layers.0.self_attn.q_proj.weight", "--names hf"] {
        assert!(manifest.contains(part), "{part} in {manifest}");
    }
    assert_code(&run(path, "verify out --against model.gguf --names hf"), 0);
    let output = run(path, "verify out --against model.gguf");
    assert_code(&output, 5);
    assert!(stdout(&output).contains("--names hf"), "{}", stdout(&output));
    assert_code(&run(path, "verify out --names hf"), 2);

    fs::write(path.join("gemma.gguf"), gguf("gemma")).unwrap();
    let output = run(path, "convert gemma.gguf gemma --names hf");
    assert_code(&output, 3);
    let text = stderr(&output);
    assert!(text.contains("gemma.gguf") && text.contains("norm weights are stored plus 1"), "{text}");
    assert!(text.contains("leave out --names hf") && !path.join("gemma").exists(), "{text}");
    assert_code(&run(path, "convert gemma.gguf gemma"), 0);
}

/// A file of the corpora: its name, its bytes, and whether it is refused.
struct Hostile {
    what: String,
    file: String,
    bytes: Vec<u8>,
    is_refused: bool,
}

/// The corpora of both formats. The library's tests compare every message and every tensor.
fn hostile() -> Vec<Hostile> {
    let torch = torch_corpus::cases().into_iter().map(|case| {
        let is_refused = matches!(case.verdict, Verdict::Refused(..));
        (case.name, "pt", case.bytes, is_refused)
    });
    let rows = gguf_corpus::named_rows().into_iter().chain(gguf_corpus::cut_rows());
    let all = torch.chain(rows.map(|(label, bytes, ..)| (label, "gguf", bytes, true)));
    let named = all.enumerate().map(|(number, (what, ending, bytes, is_refused))| Hostile {
        what,
        file: format!("hostile-{number}.{ending}"),
        bytes,
        is_refused,
    });
    named.collect()
}

/// Runs the program on a file. Returns what is wrong.
fn check(place: &Path, line: &str, case: &Hostile, start: Duration) -> Option<String> {
    let limit = start + Duration::from_secs(1);
    // The machine may be busy: what hangs does so every time.
    let mut tries = (0..3).map(|_| {
        let started = Instant::now();
        let output = run(place, line);
        (output, started.elapsed())
    });
    let Some((output, _)) = tries.find(|(_, time)| *time < limit) else {
        return Some(format!("takes more than {limit:?}"));
    };
    let (code, text) = (output.status.code(), stderr(&output));
    let is_right = match case.is_refused {
        true => code == Some(3) && text.contains(&case.file) && text.contains("LC03"),
        false => code == Some(0),
    };
    let is_right = is_right && !text.contains("panicked");
    (!is_right).then(|| format!("exit code {code:?}: {text}"))
}

#[test]
fn hostile_files_end_with_the_documented_code() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path();
    let time = || {
        let started = Instant::now();
        run(path, "--version");
        started.elapsed()
    };
    let start = (0..5).map(|_| time()).max().unwrap();
    let (mut wrong, mut runs) = (Vec::new(), 0);
    for (number, case) in sample(hostile(), 11).into_iter().enumerate() {
        fs::write(path.join(&case.file), &case.bytes).unwrap();
        let line = |command: &str| format!("{command} {}", case.file);
        // A load starts another process, and takes longer.
        let commands = if number % 8 == 0 { &["inspect", "plan", "run"][..] } else { &["inspect"] };
        for command in commands {
            runs += 1;
            let start = if *command == "run" { start + Duration::from_secs(2) } else { start };
            if let Some(what) = check(path, &line(command), &case, start) {
                wrong.push(format!("{command}, {}: {what}", case.what));
            }
        }
        fs::remove_file(path.join(&case.file)).unwrap();
    }
    println!("{runs} runs");
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}
