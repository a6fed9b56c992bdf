#![allow(clippy::as_conversions, clippy::cast_precision_loss, reason = "rounded figures")]
//! One-time costs besides copies: page-locking host memory and allocating device memory.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::driver::{Answer, Gpu};
use crate::plain::HugeBuffer;
use crate::rate::{Effort, Times, row};

const MIB: usize = 1 << 20;
const GIB: f64 = (1u64 << 30) as f64;

/// Allocating, registering and unregistering memory in huge pages.
pub(crate) fn registration(gpu: &Gpu, effort: &Effort) -> Vec<Value> {
    let sizes = [16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB];
    let sizes = effort.pick(&sizes[..], &sizes[..1]);
    let fresh = sizes.iter().take_while(|_| !effort.is_over());
    fresh.map(|bytes| row(json!({ "bytes": bytes }), register(gpu, effort, *bytes))).collect()
}

fn register(gpu: &Gpu, effort: &Effort, bytes: usize) -> Answer<Value> {
    let start = Instant::now();
    let mut buffer = Some(HugeBuffer::new(bytes)?);
    let touched = start.elapsed();
    let (mut on, mut off) = (Vec::new(), Vec::new());
    for _ in 0..effort.pick(5, 1) {
        let Some(memory) = buffer.take() else { break };
        let start = Instant::now();
        let registered = gpu.register(memory)?;
        on.push(start.elapsed());
        let start = Instant::now();
        buffer = registered.into_buffer();
        off.push(start.elapsed());
    }
    let (on, off) = (median(on), median(off));
    let per_gib = |time: Duration| time.as_secs_f64() * GIB / bytes as f64;
    Ok(json!({
        "map_and_touch_seconds": touched.as_secs_f64(),
        "register_seconds": on.as_secs_f64(),
        "unregister_seconds": off.as_secs_f64(),
        "register_seconds_per_gib": per_gib(on),
        "unregister_seconds_per_gib": per_gib(off),
    }))
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

/// Allocating and freeing device memory in blocks of a layer's size, plain and from a pool (new,
/// then reused).
pub(crate) fn allocation(gpu: &Gpu, effort: &Effort) -> Vec<Value> {
    let mut rows = Vec::new();
    for block_bytes in effort.pick(vec![2 * MIB, 64 * MIB, 512 * MIB], vec![2 * MIB]) {
        let free = gpu.memory().map_or(0, |(free, _)| free);
        let count = (8 * 1024 * MIB).min(free / 2) / block_bytes;
        let count = count.min(effort.pick(256, 8));
        if effort.is_over() || count == 0 {
            break;
        }
        let fields = |method| json!({ "method": method, "block_bytes": block_bytes, "count": count });
        rows.push(row(fields("cuMemAlloc"), plainly(gpu, block_bytes, count)));
        match from_pool(gpu, block_bytes, count) {
            Ok([fresh, again]) => {
                rows.push(row::<String>(fields("pool, fresh"), Ok(fresh)));
                rows.push(row::<String>(fields("pool, used again"), Ok(again)));
            }
            Err(error) => rows.push(row(fields("pool"), Err(error))),
        }
    }
    rows
}

fn plainly(gpu: &Gpu, block_bytes: usize, count: usize) -> Answer<Value> {
    let start = Instant::now();
    let blocks: Vec<_> = (0..count).map(|_| gpu.allocate(block_bytes)).collect::<Answer<_>>()?;
    let taken = start.elapsed();
    let start = Instant::now();
    drop(blocks);
    Ok(figures(taken, start.elapsed(), block_bytes * count))
}

fn from_pool(gpu: &Gpu, block_bytes: usize, count: usize) -> Answer<[Value; 2]> {
    let (pool, stream) = (gpu.pool()?, gpu.stream()?);
    let turn = || {
        let start = Instant::now();
        let blocks: Vec<_> =
            (0..count).map(|_| pool.allocate(block_bytes, &stream)).collect::<Answer<_>>()?;
        stream.wait()?;
        let taken = start.elapsed();
        let start = Instant::now();
        for block in blocks {
            pool.free(block, &stream)?;
        }
        stream.wait()?;
        Answer::Ok(figures(taken, start.elapsed(), block_bytes * count))
    };
    let (fresh, again) = (turn()?, turn()?);
    let start = Instant::now();
    pool.trim()?;
    Ok([fresh, row::<String>(again, Ok(json!({ "trim_seconds": start.elapsed().as_secs_f64() })))])
}

fn figures(taken: Duration, freed: Duration, bytes: usize) -> Value {
    let taken = Times::once(taken).median();
    json!({
        "allocate_seconds": taken,
        "free_seconds": freed.as_secs_f64(),
        "allocate_seconds_per_gb": taken * 1e9 / bytes as f64,
    })
}
