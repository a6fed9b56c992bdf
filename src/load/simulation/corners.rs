//! What only few loads meet: a first layer without bytes, and a queue when the gate opens to all.

use super::*;

/// It needs a place in the window like any other, before the layer whose bytes are read first.
#[test]
fn a_first_layer_without_bytes_has_its_place_first() {
    for window in 1..3 {
        let folder = tempfile::tempdir().unwrap();
        let mut header = String::from(
            "{\"model.embed_tokens.weight\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}",
        );
        for layer in 0..6 {
            let (start, end) = (layer * 100_000, (layer + 1) * 100_000);
            header.push_str(&format!(
                ",\"model.layers.{layer}.a.weight\":{{\"dtype\":\"U8\",\"shape\":[100000],\"data_offsets\":[{start},{end}]}}"
            ));
        }
        header.push('}');
        let path = folder.path().join("model.safetensors");
        let file = [&to_u64(header.len()).to_le_bytes(), header.as_bytes(), &[7; 600_000]].concat();
        std::fs::write(&path, file).unwrap();
        let checkpoint = Checkpoint::open(path).unwrap();
        let mut limits = PlanLimits::new(6 << 20);
        (limits.window, limits.readers) = (Window::Layers(window), 2);
        let backend = LateBackend::default();
        let faults = SourceFaults::default();
        let mut run = start_on(folder, checkpoint, &limits, backend, &faults, HandOut::WhenComplete);
        let first = run.stream.next().unwrap().unwrap();
        assert_eq!((first.index(), first.tensor_bytes()), (0, 0));
        // Time for the arena of another layer, were it asked for: copies to a layer without a place would begin.
        std::thread::sleep(Duration::from_millis(200));
        drop(first);
        assert_eq!(run.finish().unwrap(), 6);
    }
}

/// When a load ends, the gate opens to all while jobs may still be there. A queue takes no more than it was made for.
#[cfg(feature = "uring")]
#[test]
fn a_queue_takes_no_more_than_it_was_made_for() {
    use super::super::Progress;
    use super::super::gate::GateKeeper;
    use super::super::queued::read_queued;
    use super::super::reader::{Job, ReaderContext};
    use crate::device::NoneBackend;
    use crate::source::{QueueingCell, ReadQueue};

    let folder = tempfile::tempdir().unwrap();
    let checkpoint = checkpoint(folder.path());
    let mut limits = PlanLimits::new(6 << 20);
    limits.alignment = source::alignment(&checkpoint).unwrap();
    let layers = Layers::group(&checkpoint).unwrap();
    let plan = Arc::new(LoadPlan::build(&checkpoint, &layers, &limits, |_| true).unwrap());
    let shape = plan.memory().ring();
    let budget = crate::budget::MemoryBudget::new(limits.host_budget_bytes);
    let ring = Ring::new(shape, budget.reserve("ring", shape.bytes()).unwrap(), None).unwrap();
    let source: Arc<dyn Source> = Arc::from(source::open(IoMode::Uring, &checkpoint).unwrap());
    let queueing = QueueingCell::default();
    let Some(queue) = ReadQueue::new(&source, 1, shape.slots, &queueing) else {
        println!("SKIPPED: {}", queueing.get());
        return;
    };
    let (jobs, job_receiver) = crossbeam_channel::unbounded();
    let (result_sender, results) = crossbeam_channel::unbounded();
    for read in 0..3 {
        let claim = ring.try_claim().unwrap();
        jobs.send(Job::<NoneBackend> { layer: 0, read, claim, arena: None }).unwrap();
    }
    drop(jobs);
    let keeper = GateKeeper::new(u32::MAX);
    let context = ReaderContext {
        plan,
        source,
        backend: Arc::new(NoneBackend),
        progress: Progress::new(0),
        gate: keeper.gate(),
    };
    read_queued(1, queue, &context, &job_receiver, &result_sender);
    drop(result_sender);
    let outcomes = results.iter().map(|result| result.outcome.map(drop).map_err(|error| error.to_string()));
    assert_eq!(outcomes.collect::<Vec<_>>(), [Ok(()), Ok(()), Ok(())]);
}
