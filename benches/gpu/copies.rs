//! Rates of copies between host and device: by chunk, by ring, by stream, registered and pageable.

use serde_json::{Value, json};

use crate::driver::{Answer, Block, Gpu, HostMemory, Stream};
use crate::plain::HugeBuffer;
use crate::rate::{Effort, Times, row};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// The measured chunk sizes.
const CHUNKS: [usize; 9] =
    [64 * KIB, 128 * KIB, 256 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 64 * MIB];
/// The chunk size of all other rows.
pub(crate) const CHUNK: usize = 4 * MIB;

/// Source, target and streams of the copies of a pass.
pub(crate) struct Bench<'gpu> {
    gpu: &'gpu Gpu,
    streams: [Stream<'gpu>; 2],
    block: Block<'gpu>,
    block_bytes: usize,
    pass_bytes: usize,
}

impl<'gpu> Bench<'gpu> {
    /// Allocates device memory and streams.
    ///
    /// # Errors
    /// Of the driver.
    pub(crate) fn new(gpu: &'gpu Gpu, effort: &Effort) -> Answer<Self> {
        let block_bytes = effort.pick(256 * MIB, 64 * MIB);
        Ok(Self {
            gpu,
            streams: [gpu.stream()?, gpu.stream()?],
            block: gpu.allocate(block_bytes)?,
            block_bytes,
            pass_bytes: effort.pick(512 * MIB, 64 * MIB),
        })
    }

    /// One pass to the device, in chunks that cycle through host memory and streams.
    ///
    /// # Errors
    /// Of the driver.
    pub(crate) fn pass(&self, memory: &HostMemory<'_>, shape: Shape) -> Answer<()> {
        for (source, target, stream) in self.walk(shape) {
            stream.to_device((&self.block, target), (memory, source), shape.chunk_bytes)?;
        }
        self.streams.iter().try_for_each(Stream::wait)
    }

    fn pass_back(&self, memory: &HostMemory<'_>, shape: Shape) -> Answer<()> {
        for (target, source, stream) in self.walk(shape) {
            stream.to_host((memory, target), (&self.block, source), shape.chunk_bytes)?;
        }
        self.streams.iter().try_for_each(Stream::wait)
    }

    /// Offset in host memory, offset in device memory and stream of each chunk of a pass.
    fn walk(&self, shape: Shape) -> impl Iterator<Item = (usize, usize, &Stream<'gpu>)> {
        let (host, device) = (shape.ring_bytes / shape.chunk_bytes, self.block_bytes / shape.chunk_bytes);
        (0..self.pass_bytes / shape.chunk_bytes).map(move |index| {
            let stream = &self.streams[index % shape.streams];
            (index % host * shape.chunk_bytes, index % device * shape.chunk_bytes, stream)
        })
    }

    /// Bytes per pass.
    pub(crate) fn pass_bytes(&self) -> usize {
        self.pass_bytes
    }
}

/// The division of copies into chunks.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) chunk_bytes: usize,
    pub(crate) ring_bytes: usize,
    pub(crate) streams: usize,
}

impl Shape {
    fn fields(self) -> Value {
        json!({ "chunk_bytes": self.chunk_bytes, "ring_bytes": self.ring_bytes, "streams": self.streams })
    }
}

/// To the device from registered memory: every chunk with one and two streams, then the usual chunk
/// from other rings.
pub(crate) fn registered(bench: &Bench<'_>, effort: &Effort) -> Vec<Value> {
    let ring_bytes = 64 * MIB;
    let swept = CHUNKS.iter().flat_map(|chunk_bytes| {
        [1, 2].map(|streams| Shape { chunk_bytes: *chunk_bytes, ring_bytes, streams })
    });
    let rings = [16 * MIB, 128 * MIB, 256 * MIB].map(|ring_bytes| Shape {
        chunk_bytes: CHUNK,
        ring_bytes,
        streams: 1,
    });
    let shapes: Vec<_> = swept.chain(rings).collect();
    let shapes = effort.pick(shapes, vec![PROBE, Shape { streams: 2, ..PROBE }]);
    rows(bench, effort, &shapes, true, Bench::pass)
}

/// The shape of the quick row that is repeated with every load.
pub(crate) const PROBE: Shape = Shape { chunk_bytes: 16 * MIB, ring_bytes: 64 * MIB, streams: 1 };

/// One row: the current rate of the link.
pub(crate) fn probe(bench: &Bench<'_>, effort: &Effort) -> Vec<Value> {
    rows(bench, effort, &[PROBE], true, Bench::pass)
}

/// To the device from memory that the driver must stage.
pub(crate) fn pageable(bench: &Bench<'_>, effort: &Effort) -> Vec<Value> {
    let shapes = [MIB, CHUNK, 64 * MIB].map(|chunk_bytes| Shape { chunk_bytes, ..PROBE });
    rows(bench, effort, effort.pick(&shapes, &shapes[..1]), false, Bench::pass)
}

/// To the host, into registered memory.
pub(crate) fn back(bench: &Bench<'_>, effort: &Effort) -> Vec<Value> {
    let shapes = [CHUNK, 16 * MIB].map(|chunk_bytes| Shape { chunk_bytes, ..PROBE });
    rows(bench, effort, effort.pick(&shapes, &shapes[..1]), true, Bench::pass_back)
}

type Pass<'gpu> = fn(&Bench<'gpu>, &HostMemory<'_>, Shape) -> Answer<()>;

fn rows<'gpu>(
    bench: &Bench<'gpu>,
    effort: &Effort,
    shapes: &[Shape],
    registered: bool,
    pass: Pass<'gpu>,
) -> Vec<Value> {
    let mut rows = Vec::new();
    for shape in shapes {
        if effort.is_over() {
            break;
        }
        let measured = times(bench, effort, *shape, registered, pass);
        rows.push(row(shape.fields(), measured.map(|times| times.rate(bench.pass_bytes))));
    }
    rows
}

fn times<'gpu>(
    bench: &Bench<'gpu>,
    effort: &Effort,
    shape: Shape,
    registered: bool,
    pass: Pass<'gpu>,
) -> Answer<Times> {
    let buffer = HugeBuffer::new(shape.ring_bytes)?;
    let memory =
        if registered { bench.gpu.register(buffer)? } else { HostMemory::pageable(bench.gpu, buffer) };
    effort.repeat(3, || pass(bench, &memory, shape))
}
