#![allow(missing_docs, reason = "a bench")]
//! The ring: taking and returning slots, with one thread, with two contending threads, and from one
//! thread to another as in a load. Slots per second; a load at 20 GB/s needs about 5000.
//!
//! `cargo bench -p onelayer --bench ring`

use std::sync::mpsc;
use std::thread;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use onelayer::for_benches::Slots;

#[path = "support/criteria.rs"]
mod criteria;

const SLOTS: u32 = 16;
const SLOT_BYTES: u64 = 4 << 20;
/// Slots per iteration, so that starting threads is a small part of it.
const TAKES: u32 = 20_000;

fn ring(criterion: &mut Criterion) {
    let slots = Slots::new(SLOTS, SLOT_BYTES).expect("memory");
    let mut group = criterion.benchmark_group("ring, 16 slots of 4 MiB");
    group.throughput(Throughput::Elements(u64::from(TAKES)));
    group.bench_function("take and give, 1 thread, 20000 slots", |bencher| {
        bencher.iter(|| take_and_give(&slots, TAKES));
    });
    group.bench_function("take and give, 2 threads, 20000 slots", |bencher| {
        bencher.iter(|| {
            thread::scope(|scope| {
                scope.spawn(|| take_and_give(&slots, TAKES / 2));
                scope.spawn(|| take_and_give(&slots, TAKES / 2));
            });
        });
    });
    group.bench_function("take here, give in another thread, 20000 slots", |bencher| {
        bencher.iter(|| hand_over(&slots));
    });
    group.finish();
}

fn take_and_give(slots: &Slots, takes: u32) {
    for _ in 0..takes {
        let mut slot = slots.take().expect("nobody keeps a slot");
        slot.mark();
    }
}

fn hand_over(slots: &Slots) {
    let (give, given) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(move || given.into_iter().for_each(drop));
        for _ in 0..TAKES {
            let slot = loop {
                match slots.take() {
                    Some(slot) => break slot,
                    None => thread::yield_now(),
                }
            };
            give.send(slot).expect("the other thread takes all");
        }
        drop(give);
    });
}

criterion_group! { name = benches; config = criteria::quick(); targets = ring }
criterion_main!(benches);
