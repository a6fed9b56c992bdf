//! Rare cases: a queue when the reader limit is lifted, owners of a layer that drop it at the same
//! time.

use super::*;
use onelayer_testing::skipped;

/// When a load ends, the reader limit is lifted while jobs may still be there. A queue takes no
/// more reads than it was made for.
#[test]
fn a_queue_takes_no_more_than_it_was_made_for() {
    use super::super::Progress;
    use super::super::channels::{ReaderLimitSetter, job_queue};
    use super::super::reader::{Job, ReaderContext, read_queued};
    use crate::device::NoneBackend;
    use crate::source::{QueueingCell, ReadQueue};

    let folder = tempfile::tempdir().unwrap();
    let checkpoint = checkpoint(folder.path());
    let mut limits = PlanLimits::new(6 << 20);
    limits.alignment = source::alignment(&checkpoint).unwrap();
    let layers = Layers::group(&checkpoint).unwrap();
    let plan = Arc::new(LoadPlan::build(&checkpoint, &layers, &limits, |_| true).unwrap());
    let shape = plan.memory().ring();
    let budget = crate::budget::MemoryBudget::new(limits.options.host_budget_bytes);
    let ring = Ring::new(shape, budget.reserve("ring", shape.bytes()).unwrap(), None).unwrap();
    let source: Arc<dyn Source> = Arc::from(source::open(IoMode::Uring, &checkpoint).unwrap());
    let queueing = QueueingCell::default();
    let Some(queue) = ReadQueue::new(&source, 1, shape.slots, &queueing) else {
        skipped(queueing.get());
        return;
    };
    let (jobs, job_receiver) = job_queue(None);
    let (result_sender, results) = crossbeam_channel::unbounded();
    for read in 0..3 {
        let claim = ring.try_claim().unwrap();
        jobs.send(Job::<NoneBackend> { turn: 0, sequence: 0, read, claim, arena: None });
    }
    drop(jobs);
    let reader_limit = ReaderLimitSetter::new(u32::MAX);
    let context = ReaderContext {
        checkpoint,
        plan,
        source,
        backend: Arc::new(NoneBackend),
        progress: Progress::new(0),
        limit: reader_limit.limit(),
    };
    read_queued(0, 1, queue, &context, &job_receiver, &result_sender);
    drop(result_sender);
    let outcomes = results.iter().map(|result| result.outcome.map(drop).map_err(|error| error.to_string()));
    assert_eq!(outcomes.collect::<Vec<_>>(), [Ok(()), Ok(()), Ok(())]);
}

/// In many passes, layers reuse the blocks of earlier layers. No block may get lost when several
/// owners drop a layer at the same moment.
#[test]
fn the_last_owner_gives_the_block_back_to_the_pool() {
    use super::super::LoadedLayer;
    use super::super::layer_data::{Content, LayerData, LayerPool};
    use crate::device::NoneBackend;

    let folder = tempfile::tempdir().unwrap();
    let checkpoint = checkpoint(folder.path());
    let layers = Layers::group(&checkpoint).unwrap();
    let limits = PlanLimits::new(6 << 20);
    let plan = Arc::new(LoadPlan::build(&checkpoint, &layers, &limits, |_| true).unwrap());
    let pool = Arc::new(LayerPool::new(1, &checkpoint, &plan));
    let layer = |pool: &Arc<LayerPool>| {
        let arena = NoneBackend.allocate(&plan.layers()[0], ArenaPlace::Own).unwrap();
        let resident = NoneBackend.seal(arena, &[]).unwrap();
        let content = Some(Content { resident, permit: None });
        LoadedLayer::pooled(pool, LayerData { content, ..LayerData::blank(&checkpoint, &plan) })
    };
    let start = std::sync::Barrier::new(3);
    for _ in 0..300 {
        let one = layer(&pool);
        assert_eq!(pool.spare_blocks(), 0);
        let others = [one.share(), one.share()];
        let tensors: Vec<_> = one.tensors().collect();
        std::thread::scope(|scope| {
            let start = &start;
            for other in others {
                scope.spawn(move || {
                    start.wait();
                    drop(other);
                });
            }
            start.wait();
            drop(one);
            drop(tensors);
        });
        assert_eq!(pool.spare_blocks(), 1);
    }
    let late = layer(&pool);
    pool.close();
    drop(late);
    assert_eq!(pool.spare_blocks(), 0, "the load has ended");
}
