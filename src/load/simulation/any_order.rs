//! Loads in the order of the files: layers scattered over them in every way, the smallest rings,
//! arenas that come at any time. Tries the claims at the head of `control`.

use std::sync::mpsc;

use proptest::prelude::*;

use super::*;
use crate::plan::ReadOrder;

/// A load that goes on for longer hangs.
const HANG: Duration = Duration::from_secs(60);

/// A checkpoint of one file that has these tensors in this order: the layer, and how many bytes.
fn scattered(folder: &Path, tensors: &[(u32, u32)]) -> Checkpoint {
    let (mut header, mut data) = (String::from("{"), Vec::new());
    for (number, &(layer, len)) in (0_u32..).zip(tensors) {
        let start = data.len();
        // As the grouping wants it: layers whose tensors have the same names.
        let before = tensors.iter().take(to_usize(u64::from(number)));
        let part = before.filter(|(other, _)| *other == layer).count();
        data.extend((0..len).map(|i| {
            let [.., byte] = i.wrapping_mul(2_654_435_761).wrapping_add(number * 97).to_le_bytes();
            byte
        }));
        let comma = if number == 0 { "" } else { "," };
        header.push_str(&format!(
            "{comma}\"model.layers.{layer}.part{part}.weight\":{{\"dtype\":\"U8\",\"shape\":[{len}],\"data_offsets\":[{start},{}]}}",
            data.len()
        ));
    }
    header.push('}');
    let path = folder.join("model.safetensors");
    let file = [&to_u64(header.len()).to_le_bytes(), header.as_bytes(), &data].concat();
    std::fs::write(&path, file).unwrap();
    Checkpoint::open(path).unwrap()
}

fn start(tensors: &[(u32, u32)], readers: u32, arena_delay_seed: u64, hand_out: HandOut) -> Run {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = scattered(folder.path(), tensors);
    let mut limits = PlanLimits::new(5 << 20);
    (limits.options.order, limits.options.readers) = (ReadOrder::Files, Some(readers));
    let backend = LateBackend { arena_delay_seed, ..LateBackend::default() };
    start_on(folder, checkpoint, &limits, backend, &SourceFaults::default(), hand_out)
}

/// Runs it to its end, or gives up if it has none. All bytes are compared.
fn finish_in_time(run: Run) -> usize {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || sender.send(run.finish()));
    receiver.recv_timeout(HANG).expect("the load hangs").unwrap()
}

/// Tensors of all sizes: without bytes, small, of a slot or more.
fn tensors() -> impl Strategy<Value = Vec<(u32, u32)>> {
    let len = prop_oneof![
        1 => Just(0_u32),
        4 => 1..9000_u32,
        4 => 66_000..300_000_u32,
        1 => 1_000_000..1_500_000_u32,
    ];
    prop::collection::vec((0..9_u32, len), 1..24)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn every_layout_ends_with_every_layer(
        tensors in tensors(),
        readers in 1..5_u32,
        seed in any::<u64>(),
    ) {
        let run = start(&tensors, readers, seed, HandOut::WhenComplete);
        prop_assert_eq!(run.stream.plan().order(), ReadOrder::Files);
        prop_assert_eq!(run.stream.plan().memory().ring().slots, 4);
        let layers = run.stream.plan().layers().len();
        prop_assert_eq!(finish_in_time(run), layers);
    }
}

/// One kind of weight after the other, as some programs write them.
fn by_kind() -> Vec<(u32, u32)> {
    (0..3).flat_map(|kind| (0..6).map(move |layer| (layer, 200_000 + kind * 4096))).collect()
}

#[test]
fn layers_complete_in_another_order_than_they_run_in() {
    // The last layer's only tensor is the first of the file.
    let mut tensors = by_kind();
    tensors.insert(0, (7, 1_200_000));
    let mut run = start(&tensors, 1, 0, HandOut::WhenComplete);
    let order: Vec<usize> = run.stream.by_ref().map(|layer| layer.unwrap().index()).collect();
    assert_eq!(order[0], 6, "{order:?}");
    let mut sorted = order.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, [0, 1, 2, 3, 4, 5, 6]);
    assert_eq!(run.finish().unwrap(), 0);
}

#[test]
fn whatever_fails_ends_the_load_and_leaks_nothing() {
    for faults in
        (0..6).flat_map(|at| [false, true].map(|panics| DeviceFaults::each_at(at, panics))).flatten()
    {
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = scattered(folder.path(), &by_kind());
        let mut limits = PlanLimits::new(5 << 20);
        (limits.options.order, limits.options.readers) = (ReadOrder::Files, Some(2));
        let backend = LateBackend { faults, arena_delay_seed: 7, ..LateBackend::default() };
        let run =
            start_on(folder, checkpoint, &limits, backend, &SourceFaults::default(), HandOut::WhenComplete);
        run.finish().unwrap_err();
    }
    for taken in 0..6 {
        let mut run = start(&by_kind(), 2, 3, HandOut::AtOnce);
        for layer in run.stream.by_ref().take(taken) {
            layer.unwrap();
        }
        drop(run.stream);
        assert_eq!(run.ledger.live_arenas.load(Ordering::SeqCst), 0);
        assert_eq!(run.ledger.in_flight.load(Ordering::SeqCst), 0);
    }
}
