//! What every plan promises, followed read by read and copy by copy.

#![allow(dead_code, reason = "each user uses its own part")]
#![allow(clippy::as_conversions, reason = "a test that cannot go on panics")]

use onelayer::checkpoint::TensorId;
use onelayer::plan::{LoadPlan, PlanLimits};
use onelayer::units::{Alignment, MIB};
use onelayer::{Checkpoint, ReadOrder};

/// Which tensors a plan was to load.
pub(crate) type Wanted<'a> = &'a dyn Fn(TensorId) -> bool;

/// The order of the files is that of the layers, sorted: the same reads, each once.
pub(crate) fn check_order(
    checkpoint: &Checkpoint,
    by_layer: &LoadPlan,
    by_file: &LoadPlan,
    is_wanted: Wanted<'_>,
) {
    let place = |read: &onelayer::plan::ReadOp| (read.request.shard, read.request.payload.start());
    assert_eq!(by_layer.order(), ReadOrder::Layers);
    assert!(by_layer.reads_in_order().eq(by_layer.reads()));
    // With a few bytes more for the plan, a slot fewer: the same cuts nevertheless.
    let mut expected: Vec<_> = by_file.reads().map(|read| place(&read)).collect();
    expected.sort();
    let found: Vec<_> = by_file.reads_in_order().map(|read| place(&read)).collect();
    // A stretch that reads through a hole goes on behind what lies in the hole: for that there is a
    // step back, and one forward again.
    let ends = by_file.reads_in_order().map(|read| (read.request.shard, read.request.payload.end()));
    if ends.zip(&found[1.min(found.len())..]).all(|(end, next)| end <= *next) {
        assert!(by_file.jumps() <= by_layer.jumps() || by_file.reads().len() != by_layer.reads().len());
    }
    let mut sorted = found.clone();
    sorted.sort();
    assert_eq!(sorted, expected, "each read once");
    let mut starts: Vec<_> = by_file
        .layers()
        .iter()
        .filter_map(|layer| layer.reads.clone().map(|index| place(&by_file.read(index))).min())
        .collect();
    starts.sort();
    assert!(
        found.iter().filter(|place| starts.contains(place)).is_sorted(),
        "first reads as the file has them"
    );
    for plan in [by_layer, by_file] {
        let arrived: Vec<_> = plan.arrivals().filter(|(_, place)| place.len_bytes() > 0).collect();
        let mut ids: Vec<_> = arrived.iter().map(|(_, place)| place.tensor).collect();
        ids.sort();
        let with_bytes =
            checkpoint.tensors().filter(|tensor| is_wanted(tensor.id) && !tensor.extent.is_empty());
        assert!(ids.into_iter().eq(with_bytes.map(|tensor| tensor.id)), "each tensor once");
        for (layer, place) in arrived {
            assert!(plan.placements(&plan.layers()[layer]).contains(place));
        }
    }
}

/// No read is longer than a slot or leaves its file, the ring has the slots that it says, and the
/// sum keeps the budget.
pub(crate) fn check_bounds(checkpoint: &Checkpoint, plan: &LoadPlan, limits: &PlanLimits) {
    let memory = plan.memory();
    let slot_bytes = memory.ring().slot_bytes;
    assert!(memory.budgeted_bytes() <= limits.options.host_budget_bytes);
    assert!(memory.ring().bytes() >= u64::from(memory.ring().slots) * slot_bytes);
    let (readers, slots) = (memory.ring().readers, memory.ring().slots);
    assert!(
        readers * 2 <= slots || readers + 4 <= slots,
        "{readers} readers leave no slot of {slots} for copies"
    );
    for read in plan.reads() {
        let request = &read.request;
        assert!(request.extent.contains(request.payload) && !request.payload.is_empty());
        assert!(
            limits.alignment.divides(request.extent.start())
                && limits.alignment.divides(request.extent.end())
        );
        assert!(request.extent.len_bytes() <= slot_bytes, "a read fits a slot");
        assert!(request.payload.end() <= checkpoint.shard(request.shard).data.end());
    }
}

/// Follows every copy of a plan that lands bytes as they are: each wanted byte arrives once, at its
/// place, within the bounds.
pub(crate) fn check(checkpoint: &Checkpoint, plan: &LoadPlan, limits: &PlanLimits, is_wanted: Wanted<'_>) {
    check_bounds(checkpoint, plan, limits);
    // Per tensor: the pieces (offset in the tensor, length) that arrived, found through the arena.
    let mut arrived = vec![0_u64; checkpoint.tensor_count()];
    for layer in plan.layers() {
        let places = plan.placements(layer);
        let mut end = 0;
        for place in places {
            assert!(Alignment::TENSOR.divides(place.arena_offset_bytes));
            assert!(place.arena_offset_bytes >= end, "places do not overlap");
            end = place.arena_offset_bytes + checkpoint.tensor(place.tensor).extent.len_bytes();
        }
        let unit = if end < 2 * MIB { Alignment::PAGE } else { Alignment::HUGE_PAGE };
        assert_eq!(layer.arena_bytes, unit.up(end).unwrap());
        for read in layer.reads.clone().map(|index| plan.read(index)) {
            let request = &read.request;
            for copy in plan.copies(&read) {
                let file_start = request.extent.start() + copy.slot_offset_bytes;
                assert!(
                    file_start >= request.payload.start()
                        && file_start + copy.len_bytes <= request.payload.end()
                );
                // A copy may carry several neighbours: walk through them.
                let mut done = 0;
                while done < copy.len_bytes {
                    let at = copy.arena_offset_bytes + done;
                    let place = places
                        .iter()
                        .rfind(|place| {
                            place.arena_offset_bytes <= at
                                && !checkpoint.tensor(place.tensor).extent.is_empty()
                        })
                        .expect("every copied byte belongs to a tensor");
                    let tensor = checkpoint.tensor(place.tensor);
                    assert_eq!(tensor.shard, request.shard);
                    let inside = at - place.arena_offset_bytes;
                    assert_eq!(file_start + done, tensor.extent.start() + inside, "the byte of this place");
                    assert_eq!(arrived[tensor.id.index()], inside, "in order, each byte once");
                    let len = (copy.len_bytes - done).min(tensor.extent.len_bytes() - inside);
                    assert!(len > 0);
                    arrived[tensor.id.index()] += len;
                    done += len;
                }
            }
        }
    }
    let mut wanted_bytes = 0;
    for tensor in checkpoint.tensors() {
        let expected = if is_wanted(tensor.id) { tensor.extent.len_bytes() } else { 0 };
        assert_eq!(arrived[tensor.id.index()], expected, "{} is complete, or left out", tensor.name);
        wanted_bytes += expected;
    }
    assert_eq!(plan.tensor_bytes(), wanted_bytes);
}
