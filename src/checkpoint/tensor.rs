//! The table of tensors: names, dtypes, shapes and extents in a few flat arrays.
//!
//! A checkpoint may have a million tensors, so nothing is allocated per tensor. The header parser
//! appends to the arrays. [`TensorTable::seal_file`] then sorts and checks the tensors of one file.

use std::ops::Range;
use std::path::PathBuf;

use super::metadata::FileMetadata;
use super::text_sort::sort_by_text;
use super::{DType, FileFormat, FileIdentity};
use crate::footprint::{Held, block_bytes};
use crate::units::{ByteRange, to_u64, to_usize};

/// Index of a file in its checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ShardId(pub(crate) u32);

impl ShardId {
    /// Position in [`Checkpoint::shards`](super::Checkpoint::shards).
    #[must_use]
    pub fn index(self) -> usize {
        to_usize(u64::from(self.0))
    }
}

/// Index of a tensor in its checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TensorId(pub(crate) u32);

impl TensorId {
    /// Position in [`Checkpoint::tensors`](super::Checkpoint::tensors).
    #[must_use]
    pub fn index(self) -> usize {
        to_usize(u64::from(self.0))
    }
}

/// One tensor, borrowed from its checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TensorEntry<'a> {
    /// Index in the checkpoint.
    pub id: TensorId,
    /// Name as the file spells it; in a diffusers directory prefixed by `component/`.
    pub name: &'a str,
    /// Element type.
    pub dtype: DType,
    /// Element type as the file spells it: the real name of an opaque type.
    pub dtype_name: &'a str,
    /// Elements per dimension, outermost first; empty for a scalar.
    pub shape: &'a [u64],
    /// The file that holds it.
    pub shard: ShardId,
    /// Its bytes, counted from the start of the file: from the first element to the end of the last.
    pub extent: ByteRange,
    /// Elements from one index to the next in the file, for each of `stride_dims`. Empty for
    /// row-major tensors. Tensors are delivered row-major.
    pub strides: &'a [u64],
    /// The dimensions that `strides` belong to: the shape, or a finer division of it, as where the
    /// rows of each head have another order. Empty for row-major tensors.
    pub stride_dims: &'a [u64],
}

/// The smallest part of a tensor that a file stores: an element of whole bytes, or a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StoredUnit {
    pub(crate) elements: u64,
    pub(crate) bytes: u64,
}

impl StoredUnit {
    /// `None` for elements that do not take whole bytes.
    pub(crate) fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::Block(block) => Some(Self { elements: block.elements(), bytes: block.bytes() }),
            element => {
                let bits = element.bits().filter(|bits| bits.is_multiple_of(8))?;
                Some(Self { elements: 1, bytes: bits / 8 })
            }
        }
    }
}

impl TensorEntry<'_> {
    /// How a tensor with strides lies in its file: bytes of a unit, and for each of `stride_dims`
    /// the units along it and the bytes from one to the next.
    ///
    /// # Panics
    /// If its elements do not take whole bytes; such tensors have no strides.
    pub(crate) fn steps(&self) -> (u64, impl DoubleEndedIterator<Item = (u64, u64)> + Clone) {
        let unit = StoredUnit::of(self.dtype).expect("only elements of whole bytes have strides");
        let steps = self.stride_dims.iter().zip(self.strides).map(move |(&len, &stride)| {
            // Blocks lie along the innermost dimension: checked when the file was opened.
            match stride < unit.elements && unit.elements > 1 {
                true => (len / unit.elements, unit.bytes),
                false => (len, stride / unit.elements * unit.bytes),
            }
        });
        (unit.bytes, steps)
    }

    /// Bytes of its elements: of the extent, unless it is not row-major there.
    ///
    /// # Panics
    /// Never: the size was checked when the file was opened.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        match self.strides {
            [] => self.extent.len_bytes(),
            _ => self.dtype.tensor_bytes(self.shape).expect("the size was checked when the file was opened"),
        }
    }
}

/// One checked file.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Shard {
    /// Its path.
    pub path: PathBuf,
    /// Its format.
    pub format: FileFormat,
    /// Its identity when it was checked.
    pub identity: FileIdentity,
    /// Its tensor bytes, counted from the start of the file. In formats with paddings: from the
    /// first tensor to the end of the last.
    pub data: ByteRange,
    /// The free text of its header: `__metadata__` in safetensors.
    pub metadata: FileMetadata,
    /// The prefix of the names of its tensors: `component/` in a pipeline, else empty.
    pub name_prefix: Box<str>,
}

impl Shard {
    pub(super) fn heap_bytes(&self) -> u64 {
        text_bytes(self.path.as_os_str().len())
            + self.metadata.heap_bytes()
            + to_u64(self.name_prefix.len().next_multiple_of(16))
    }
}

/// Memory of a text that contains a path, rounded up to steps of 256 bytes. So plans do not depend
/// on the length of the path to a checkpoint.
pub(super) fn text_bytes(len: usize) -> u64 {
    to_u64(len.next_multiple_of(256))
}

/// One tensor in the table: 40 bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Record {
    /// First byte: counted from the data section until the file is sealed, then from the start of
    /// the file.
    pub(super) start: u64,
    /// One past the last byte, counted as `start`.
    pub(super) end: u64,
    /// The name in `names`.
    pub(super) name: Span,
    /// The shape in `dims`.
    pub(super) shape: Span,
    /// Position in `opaque_names` if the dtype is opaque. Otherwise one more than its position in
    /// `views`, or 0 for a row-major tensor.
    pub(super) detail: u32,
    pub(super) dtype: DType,
}

/// How a tensor that is not row-major lies in its extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct View {
    /// The dimensions that the strides belong to, in `dims`.
    pub(super) dims: Span,
    /// In `dims`.
    pub(super) strides: Span,
}

/// A further name of a tensor.
#[derive(Clone, Copy, Debug)]
struct Alias {
    name: Span,
    id: u32,
}

/// Which bytes of a file its tensors take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Coverage {
    /// All bytes of this range, each once.
    Exact(ByteRange),
    /// Any; tensors may share bytes.
    Any,
    /// Any; tensors may not overlap.
    Apart,
}

impl Record {
    fn extent(&self) -> ByteRange {
        ByteRange::new(self.start, self.end).expect("the parser refuses reversed offsets")
    }
}

/// A part of one of the table's arrays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Span {
    start: u32,
    len: u32,
}

impl Span {
    /// From `start` to the end of an array of `len` items; `None` if 32 bits are too few.
    pub(super) fn tail(start: usize, len: usize) -> Option<Self> {
        Some(Self { start: start.try_into().ok()?, len: len.checked_sub(start)?.try_into().ok()? })
    }

    pub(super) fn range(self) -> Range<usize> {
        let start = to_usize(u64::from(self.start));
        start..start + to_usize(u64::from(self.len))
    }
}

/// The lengths of the table's arrays, to remove again what a faulty file added.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Mark {
    records: usize,
    names: usize,
    dims: usize,
    opaque_names: usize,
    by_name: usize,
    files: usize,
    views: usize,
    aliases: usize,
}

/// A fault in the layout of a file.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum LayoutFault {
    /// Two tensors have the same name.
    Duplicate(String),
    /// The tensor starts after the end of the one before.
    Hole { tensor: String, expected_start: u64, found_start: u64 },
    /// The tensor starts before the end of the one before.
    Overlap { tensor: String, other: String, expected_start: u64, found_start: u64 },
    /// This tensor, the first of several, does not end inside the file.
    Truncated { tensor: String, data_bytes: u64 },
    /// Bytes after the last tensor.
    Trailing { data_bytes: u64 },
    /// More tensors than ids can count.
    TooMany,
}

/// Flat storage of all tensors.
#[derive(Debug, Default)]
pub(crate) struct TensorTable {
    /// By file, then by offset, then by name; ids count in this order.
    pub(super) records: Vec<Record>,
    /// All names, one after the other.
    pub(super) names: String,
    /// All shapes, one after the other. Neighbours with equal shapes share one.
    pub(super) dims: Vec<u64>,
    /// Names of opaque dtypes, in `names`.
    pub(super) opaque_names: Vec<Span>,
    /// Strides of tensors that are not row-major.
    pub(super) views: Vec<View>,
    /// Further names of tensors that share all their bytes with an earlier one; sorted by name.
    aliases: Vec<Alias>,
    /// Ids, sorted by name: within each file while the table is built, then over all.
    by_name: Vec<u32>,
    /// The id after the last of each file.
    file_ends: Vec<u32>,
    /// Peak of memory beside the table while it was built: keys of unknown fields, free text.
    beside_bytes: u64,
}

impl TensorTable {
    pub(crate) fn len(&self) -> usize {
        self.records.len()
    }

    pub(crate) fn iter(&self) -> impl ExactSizeIterator<Item = TensorEntry<'_>> {
        let mut shard = 0_u32;
        self.records.iter().enumerate().map(move |(position, record)| {
            let id = u32::try_from(position).expect("sealing a file refuses more tensors than ids");
            while self.file_ends[to_usize(u64::from(shard))] <= id {
                shard += 1;
            }
            self.describe(TensorId(id), ShardId(shard), record)
        })
    }

    pub(crate) fn entry(&self, id: TensorId) -> TensorEntry<'_> {
        self.describe(id, self.shard_of(id), &self.records[id.index()])
    }

    /// The file of a tensor alone.
    pub(crate) fn shard_of(&self, id: TensorId) -> ShardId {
        // Checkpoints with very many tensors are mostly one file.
        let shard = match self.file_ends[..] {
            [_] => 0,
            _ => self.file_ends.partition_point(|&end| end <= id.0),
        };
        ShardId(u32::try_from(shard).expect("a set has at most 65536 files per part and 256 parts"))
    }

    /// The bytes of a tensor alone.
    pub(crate) fn extent_of(&self, id: TensorId) -> ByteRange {
        self.records[id.index()].extent()
    }

    fn describe<'a>(&'a self, id: TensorId, shard: ShardId, record: &Record) -> TensorEntry<'a> {
        let dtype_name = match record.dtype {
            DType::Opaque => {
                let span = self.opaque_names[to_usize(u64::from(record.detail))];
                &self.names[span.range()]
            }
            known => known.name(),
        };
        TensorEntry {
            id,
            name: self.name(record),
            dtype: record.dtype,
            dtype_name,
            shape: self.shape(record.shape),
            shard,
            extent: record.extent(),
            strides: self.strides(record),
            stride_dims: self.view(record).map_or(&[], |view| self.shape(view.dims)),
        }
    }

    fn view(&self, record: &Record) -> Option<View> {
        let view = match record.dtype {
            DType::Opaque => None,
            _ => to_usize(u64::from(record.detail)).checked_sub(1),
        };
        view.map(|view| self.views[view])
    }

    fn strides(&self, record: &Record) -> &[u64] {
        self.view(record).map_or(&[], |view| self.shape(view.strides))
    }

    /// The strides of a tensor alone.
    pub(crate) fn strides_of(&self, id: TensorId) -> &[u64] {
        self.strides(&self.records[id.index()])
    }

    /// Appends dimensions or strides; `None` if 32 bits are too few.
    pub(super) fn add_dims(&mut self, dims: &[u64]) -> Option<Span> {
        let start = self.dims.len();
        self.dims.extend_from_slice(dims);
        Span::tail(start, self.dims.len())
    }

    fn name(&self, record: &Record) -> &str {
        &self.names[record.name.range()]
    }

    /// A part of the names.
    pub(super) fn spelled(&self, span: Span) -> &str {
        &self.names[span.range()]
    }

    pub(super) fn shape(&self, span: Span) -> &[u64] {
        &self.dims[span.range()]
    }

    pub(super) fn name_of(&self, id: u32) -> &str {
        self.name(&self.records[to_usize(u64::from(id))])
    }

    pub(crate) fn find(&self, name: &str) -> Option<TensorId> {
        match self.by_name.binary_search_by(|&id| self.name_of(id).cmp(name)) {
            Ok(position) => Some(TensorId(self.by_name[position])),
            Err(_) => self.find_alias(name),
        }
    }

    /// The tensor that has this as a further name.
    pub(super) fn find_alias(&self, name: &str) -> Option<TensorId> {
        let position = self.aliases.binary_search_by(|alias| self.spelled(alias.name).cmp(name)).ok()?;
        Some(TensorId(self.aliases[position].id))
    }

    /// Further names of tensors, sorted, each with its tensor.
    pub(crate) fn aliases(&self) -> impl ExactSizeIterator<Item = (&str, TensorId)> {
        self.aliases.iter().map(|alias| (self.spelled(alias.name), TensorId(alias.id)))
    }

    /// Bytes of all tensors, as row-major tensors; `None` on overflow.
    pub(super) fn tensor_bytes(&self) -> Option<u64> {
        self.records.iter().try_fold(0_u64, |sum, record| {
            let bytes = match self.strides(record) {
                [] => record.end - record.start,
                _ => record.dtype.tensor_bytes(self.shape(record.shape))?,
            };
            sum.checked_add(bytes)
        })
    }

    /// Memory held, in bytes.
    pub(crate) fn heap_bytes(&self) -> u64 {
        to_u64(self.records.capacity() * size_of::<Record>())
            + to_u64(self.names.capacity())
            + to_u64(self.dims.capacity() * size_of::<u64>())
            + to_u64(self.opaque_names.capacity() * size_of::<Span>())
            + to_u64(self.views.capacity() * size_of::<View>())
            + to_u64(self.aliases.capacity() * size_of::<Alias>())
            + to_u64(self.by_name.capacity() * size_of::<u32>())
            + to_u64(self.file_ends.capacity() * size_of::<u32>())
    }

    /// Memory of the growing arrays and of what was held beside them.
    pub(super) fn held(&self) -> Held {
        let lists = Held::default().grown_list(&self.records).grown_list(&self.dims);
        let named = lists.grown(block_bytes(to_u64(self.names.capacity()))).grown_list(&self.by_name);
        let shared = named.grown_list(&self.views).grown_list(&self.aliases);
        shared.grown_list(&self.opaque_names).grown_list(&self.file_ends).and(self.beside_bytes)
    }

    /// Counts memory that was held for a moment beside the table.
    pub(super) fn note_beside(&mut self, scratch: Held) {
        self.beside_bytes = self.beside_bytes.max(scratch.peak_bytes());
    }

    /// The current lengths of the arrays.
    pub(super) fn mark(&self) -> Mark {
        Mark {
            records: self.records.len(),
            names: self.names.len(),
            dims: self.dims.len(),
            opaque_names: self.opaque_names.len(),
            by_name: self.by_name.len(),
            files: self.file_ends.len(),
            views: self.views.len(),
            aliases: self.aliases.len(),
        }
    }

    /// Removes everything added since `mark`.
    pub(super) fn rewind(&mut self, mark: Mark) {
        self.records.truncate(mark.records);
        self.names.truncate(mark.names);
        self.dims.truncate(mark.dims);
        self.opaque_names.truncate(mark.opaque_names);
        self.by_name.truncate(mark.by_name);
        self.file_ends.truncate(mark.files);
        self.views.truncate(mark.views);
        self.aliases.truncate(mark.aliases);
    }

    /// Completes a file: sorts the records since `mark`, checks that no name occurs twice and which
    /// bytes they take, and turns their offsets into offsets from the start of the file. Returns
    /// the bytes from the first tensor to the end of the last.
    pub(super) fn seal_file(&mut self, mark: Mark, coverage: Coverage) -> Result<ByteRange, LayoutFault> {
        let names = &self.names;
        let name = |record: &Record| &names[record.name.range()];
        self.records[mark.records..].sort_unstable_by(|left, right| {
            (left.start, left.end).cmp(&(right.start, right.end)).then_with(|| name(left).cmp(name(right)))
        });
        if coverage == Coverage::Any {
            self.join_shared(mark)?;
        }
        let file_end = u32::try_from(self.records.len()).map_err(|_| LayoutFault::TooMany)?;
        let file_start = u32::try_from(mark.records).map_err(|_| LayoutFault::TooMany)?;
        let (names, records) = (&self.names, &self.records);
        let text_of = |id: u32| &names.as_bytes()[records[to_usize(u64::from(id))].name.range()];
        self.by_name.extend(file_start..file_end);
        if let Some(id) = sort_by_text(&mut self.by_name[mark.by_name..], text_of) {
            return Err(LayoutFault::Duplicate(self.name_of(id).to_owned()));
        }
        let data = match coverage {
            Coverage::Exact(data) => data,
            Coverage::Any | Coverage::Apart => self.hull(mark),
        };
        match coverage {
            Coverage::Any => self.check_aliases(mark)?,
            Coverage::Apart => self.check_apart(mark)?,
            Coverage::Exact(data) => {
                self.check_coverage(mark.records, data)?;
                for record in &mut self.records[mark.records..] {
                    // No overflow: by the coverage check, both are inside the file.
                    record.start += data.start();
                    record.end += data.start();
                }
            }
        }
        self.file_ends.push(file_end);
        Ok(data)
    }

    /// Turns tensors that share all their bytes, dtype, shape and strides into one with several
    /// names: the first name in the file is the tensor's, the others are aliases.
    fn join_shared(&mut self, mark: Mark) -> Result<(), LayoutFault> {
        let mut kept = mark.records;
        let mut at = mark.records;
        while at < self.records.len() {
            let first = self.records[at];
            let is_over_it = |other: &&Record| (other.start, other.end) == (first.start, first.end);
            let end = at + self.records[at..].iter().take_while(is_over_it).count();
            kept = match end - at > 1 && first.start < first.end {
                true => self.join_over_each_other(at..end, kept)?,
                false => {
                    self.records.copy_within(at..end, kept);
                    kept + (end - at)
                }
            };
            at = end;
        }
        self.records.truncate(kept);
        let names = &self.names;
        let text = |alias: &Alias| &names[alias.name.range()];
        self.aliases[mark.aliases..].sort_unstable_by(|left, right| text(left).cmp(text(right)));
        Ok(())
    }

    /// The same for records over the same bytes. They are moved to `kept`, sorted by name; returns
    /// the end of those that stay.
    fn join_over_each_other(&mut self, group: Range<usize>, kept: usize) -> Result<usize, LayoutFault> {
        let mut records = self.records[group].to_vec();
        let kind = |record: &Record| (record.dtype, self.shape(record.shape), self.strides(record));
        // Names were appended in the order of the file.
        records.sort_unstable_by(|left, right| {
            kind(left).cmp(&kind(right)).then_with(|| left.name.start.cmp(&right.name.start))
        });
        let mut chosen: Vec<(Record, Vec<Span>)> = Vec::new();
        for record in records {
            match chosen.last_mut().filter(|(last, _)| kind(last) == kind(&record)) {
                Some((_, others)) => others.push(record.name),
                None => chosen.push((record, Vec::new())),
            }
        }
        chosen.sort_unstable_by(|(left, _), (right, _)| self.name(left).cmp(self.name(right)));
        let end = kept + chosen.len();
        for (place, (record, others)) in (kept..).zip(chosen) {
            let id = u32::try_from(place).map_err(|_| LayoutFault::TooMany)?;
            self.records[place] = record;
            self.aliases.extend(others.into_iter().map(|name| Alias { name, id }));
        }
        Ok(end)
    }

    /// The bytes from the first tensor to the end of the last. Empty tensors do not count.
    fn hull(&self, mark: Mark) -> ByteRange {
        let filled = || self.records[mark.records..].iter().filter(|record| record.start < record.end);
        let start = filled().map(|record| record.start).min().unwrap_or(0);
        let end = filled().map(|record| record.end).max().unwrap_or(0);
        ByteRange::new(start, end).expect("the start of a tensor is before its end")
    }

    /// Refuses a file in which an alias has the name of another tensor.
    fn check_aliases(&self, mark: Mark) -> Result<(), LayoutFault> {
        let aliases = &self.aliases[mark.aliases..];
        let name = |alias: &Alias| self.spelled(alias.name);
        let twice = aliases.windows(2).find(|pair| name(&pair[0]) == name(&pair[1])).map(|pair| &pair[0]);
        let by_name = &self.by_name[mark.by_name..];
        let is_tensor =
            |alias: &&Alias| by_name.binary_search_by(|&id| self.name_of(id).cmp(name(alias))).is_ok();
        match twice.or_else(|| aliases.iter().find(is_tensor)) {
            Some(alias) => Err(LayoutFault::Duplicate(name(alias).to_owned())),
            None => Ok(()),
        }
    }

    /// Refuses a file in which two tensors share bytes.
    fn check_apart(&self, mark: Mark) -> Result<(), LayoutFault> {
        let records = &self.records[mark.records..];
        let Some(overlap) = records.windows(2).find(|pair| pair[1].start < pair[0].end) else {
            return Ok(());
        };
        let [other, tensor] = [&overlap[0], &overlap[1]];
        let (expected_start, found_start) = (other.end, tensor.start);
        let (tensor, other) = (self.name(tensor).to_owned(), self.name(other).to_owned());
        Err(LayoutFault::Overlap { tensor, other, expected_start, found_start })
    }

    fn check_coverage(&self, first: usize, data: ByteRange) -> Result<(), LayoutFault> {
        let mut covered = 0;
        for (position, record) in self.records.iter().enumerate().skip(first) {
            let tensor = || self.name(record).to_owned();
            let (expected_start, found_start) = (covered, record.start);
            if found_start > expected_start {
                return Err(LayoutFault::Hole { tensor: tensor(), expected_start, found_start });
            }
            if found_start < expected_start {
                let other = self.name(&self.records[position - 1]).to_owned();
                return Err(LayoutFault::Overlap { tensor: tensor(), other, expected_start, found_start });
            }
            covered = record.end;
        }
        match covered.cmp(&data.len_bytes()) {
            std::cmp::Ordering::Equal => Ok(()),
            std::cmp::Ordering::Less => Err(LayoutFault::Trailing { data_bytes: covered }),
            std::cmp::Ordering::Greater => {
                let cut = self.records[first..].iter().find(|record| record.end > data.len_bytes());
                let tensor = cut.map_or_else(String::new, |record| self.name(record).to_owned());
                Err(LayoutFault::Truncated { tensor, data_bytes: covered })
            }
        }
    }

    /// Merges the name indices of all files since `mark`, for [`Self::sorted_since`].
    pub(super) fn merge_names(&mut self, mark: Mark) {
        if self.file_ends.len() > mark.files + 1 {
            let (records, names) = (&self.records, &self.names);
            let alias_name = |alias: &Alias| &names[alias.name.range()];
            self.aliases[mark.aliases..].sort_by(|left, right| alias_name(left).cmp(alias_name(right)));
            let name_of = |id: u32| &names[records[to_usize(u64::from(id))].name.range()];
            // A stable sort finds the sorted runs of the files and merges them.
            self.by_name[mark.by_name..].sort_by(|&left, &right| name_of(left).cmp(name_of(right)));
        }
    }

    /// Ids of the tensors since `mark`, sorted by name once [`Self::merge_names`] has run.
    pub(super) fn sorted_since(&self, mark: Mark) -> impl ExactSizeIterator<Item = TensorId> {
        self.by_name[mark.by_name..].iter().map(|&id| TensorId(id))
    }

    /// Gives back spare capacity.
    pub(super) fn shrink(&mut self) {
        self.records.shrink_to_fit();
        self.names.shrink_to_fit();
        self.dims.shrink_to_fit();
        self.opaque_names.shrink_to_fit();
        self.views.shrink_to_fit();
        self.aliases.shrink_to_fit();
        self.by_name.shrink_to_fit();
        self.file_ends.shrink_to_fit();
    }
}
