//! What opening a PyTorch file of a million tensors costs, each in a storage of its own and all in
//! one. The pickles have every opcode that `torch.save` writes, memo included.
//!
//! Figures are printed: `cargo test -p onelayer --release --test loader -- torch_million
//! --nocapture`.

use std::fs::File;
use std::io::BufWriter;
use std::path::Path;
use std::time::Duration;

use onelayer_testing::torch_file::ZipWriter;

use super::checkpoint_million::{MIB, PATIENCE, measured, to_f64};

/// A debug build takes a minute for a million.
const COUNT: u32 = if cfg!(debug_assertions) { 50_000 } else { 1_000_000 };

/// Writes opcodes and numbers what goes into the memo, as a pickler does.
struct Pickler {
    text: Vec<u8>,
    memo: u32,
}

impl Pickler {
    fn raw(&mut self, bytes: &[u8]) {
        self.text.extend_from_slice(bytes);
    }

    fn put(&mut self) -> u32 {
        let index = self.memo;
        self.memo += 1;
        match u8::try_from(index) {
            Ok(index) => self.raw(&[b'q', index]),
            Err(_) => {
                self.raw(b"r");
                self.raw(&index.to_le_bytes());
            }
        }
        index
    }

    fn get(&mut self, index: u32) {
        self.raw(&[b'h', u8::try_from(index).unwrap()]);
    }

    fn text(&mut self, text: &str) -> u32 {
        self.raw(b"X");
        self.raw(&u32::try_from(text.len()).unwrap().to_le_bytes());
        self.raw(text.as_bytes());
        self.put()
    }

    fn int(&mut self, value: u32) {
        match u8::try_from(value) {
            Ok(value) => self.raw(&[b'K', value]),
            Err(_) => {
                self.raw(b"J");
                self.raw(&value.to_le_bytes());
            }
        }
    }

    /// What was put there, or, the first time, what `first` writes.
    fn shared(&mut self, known: &mut Option<u32>, first: impl Fn(&mut Self)) {
        match *known {
            Some(index) => self.get(index),
            None => {
                first(self);
                *known = Some(self.put());
            }
        }
    }
}

/// What all tensors share in the memo.
#[derive(Default)]
struct Shared {
    rebuild: Option<u32>,
    storage: Option<u32>,
    class: Option<u32>,
    place: Option<u32>,
    hooks: Option<u32>,
}

/// A state dictionary of tensors of two bytes. With `one` they all lie in one storage.
fn pickle(one: bool) -> Vec<u8> {
    let mut pickler = Pickler { text: b"\x80\x02ccollections\nOrderedDict\n".to_vec(), memo: 0 };
    let mut shared = Shared { hooks: Some(pickler.put()), ..Shared::default() };
    pickler.raw(b")R");
    pickler.put();
    let text = |text: &'static str| {
        move |pickler: &mut Pickler| {
            pickler.raw(&[b'X', u8::try_from(text.len()).unwrap(), 0, 0, 0]);
            pickler.raw(text.as_bytes());
        }
    };
    for number in 0..COUNT {
        if number % 1000 == 0 {
            pickler.raw(b"(");
        }
        pickler.text(&format!("model.layers.{}.mlp.experts.{}.w", number / 1000, number % 1000));
        pickler.shared(&mut shared.rebuild, |pickler| pickler.raw(b"ctorch._utils\n_rebuild_tensor_v2\n"));
        pickler.raw(b"((");
        pickler.shared(&mut shared.storage, text("storage"));
        pickler.shared(&mut shared.class, |pickler| pickler.raw(b"ctorch\nBFloat16Storage\n"));
        pickler.text(&if one { 0 } else { number }.to_string());
        pickler.shared(&mut shared.place, text("cpu"));
        pickler.int(if one { COUNT } else { 1 });
        pickler.raw(b"t");
        pickler.put();
        pickler.raw(b"Q");
        pickler.int(if one { number } else { 0 });
        for _ in 0..2 {
            pickler.raw(b"K\x01\x85");
            pickler.put();
        }
        pickler.raw(b"\x89");
        pickler.get(shared.hooks.unwrap());
        pickler.raw(b")R");
        pickler.put();
        pickler.raw(b"t");
        pickler.put();
        pickler.raw(b"R");
        pickler.put();
        if number % 1000 == 999 {
            pickler.raw(b"u");
        }
    }
    pickler.raw(b".");
    pickler.text
}

fn write(path: &Path, one: bool) {
    let mut zip = ZipWriter::new(BufWriter::new(File::create(path).unwrap()), "million");
    zip.add("data.pkl", &pickle(one)).unwrap();
    zip.add("byteorder", b"little").unwrap();
    match one {
        true => zip.add("data/0", &vec![1; 2 * usize::try_from(COUNT).unwrap()]).unwrap(),
        false => (0..COUNT).for_each(|number| zip.add(&format!("data/{number}"), &[1, 2]).unwrap()),
    }
    zip.add("version", b"3\n").unwrap();
    zip.finish().unwrap();
}

#[test]
fn a_million_tensors_are_opened_in_bounded_time_and_memory() {
    let folder = tempfile::tempdir().unwrap();
    for (label, one) in [("in one storage", true), ("each in a storage", false)] {
        let path = folder.path().join("million.pt");
        write(&path, one);
        let cost = measured(&path);
        println!(
            "{COUNT} tensors {label}: file of {:.1} MB, {:.3} s, peak + {:.1} MiB, held {:.1} MiB",
            to_f64(path.metadata().unwrap().len()) / 1e6,
            cost.time.as_secs_f64(),
            to_f64(cost.peak_growth_bytes) / 1024.0 / 1024.0,
            to_f64(cost.held_bytes) / 1024.0 / 1024.0,
        );
        assert_eq!(cost.outcome, "Ok");
        assert!(cost.peak_growth_bytes <= 250 * MIB, "{}", cost.peak_growth_bytes);
        assert!(cost.time <= Duration::from_secs(1) * PATIENCE, "{:?}", cost.time);
    }
}
