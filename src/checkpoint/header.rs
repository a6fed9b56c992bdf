//! Parses the header of a safetensors file: JSON text -> records in the table.
//!
//! ```text
//! { "__metadata__": { text: text, ... },
//!   name: { "dtype": text, "shape": [n, ...], "data_offsets": [start, end] }, ... }
//! ```
//!
//! Strict: exactly the format is accepted. Unknown fields of a tensor are skipped, as the reference
//! does. Differences from the reference, the safetensors crate 0.8:
//!
//! | input | reference | here |
//! |---|---|---|
//! | a key twice in one object | keeps the last | refused: two readers could see two files in one |
//! | an array for a tensor's object, a tagged value for a dtype | accepted by its derived reader | refused: the format names neither |
//! | `"__metadata__": null` | accepted | refused: the format asks for a map |
//! | a shape with a zero and an overflow | depends on which comes first | refused: no framework can make it |
//! | offsets near 2^64 | panics with overflow checks | refused |
//! | a number beyond `f64` in an unknown field | refused | read over |
//! | whitespace before `{` | accepted | accepted, though the format asks for `{` |
//!
//! A test against the reference keeps this list complete. [`TensorTable::seal_file`] checks the
//! offsets against each other once the whole header is known.
//!
//! Format: <https://huggingface.co/docs/safetensors/index#format>.

use std::io::Read;
use std::path::Path;

use super::dtype::total_bits;
use super::error::{CheckpointError, JsonSection, kept, shape_text};
use super::json::OpenKeys;
use super::json::{Cursor, JsonFault, JsonReader};
use super::metadata::FileMetadata;
use super::tensor::{Record, Span, TensorTable};
use super::{DType, UnknownDType};

/// The one key that is not a tensor.
const METADATA_KEY: &str = "__metadata__";

/// Reads one header into a table.
pub(super) struct HeaderParser<'a, R> {
    pub(super) path: &'a Path,
    /// Prefix of every name.
    pub(super) prefix: &'a str,
    /// Accept dtypes that the format does not know.
    pub(super) allow_opaque: bool,
    pub(super) json: JsonReader<R>,
    pub(super) table: &'a mut TensorTable,
}

/// The three fields of a tensor that were seen so far.
#[derive(Default)]
struct Fields {
    dtype: Option<(DType, u32)>,
    shape: Option<Span>,
    offsets: Option<(u64, u64)>,
}

impl<R: Read> HeaderParser<'_, R> {
    /// Reads the whole header and appends its tensors to the table. The file is not sealed yet.
    pub(super) fn parse(mut self) -> Result<FileMetadata, CheckpointError> {
        let mut keys = OpenKeys::default();
        let mut metadata = None;
        self.json
            .open_object("`{`, the start of the header")
            .map_err(|fault| self.fault(fault, JsonSection::Header))?;
        let mut first = true;
        let mut kind = Kind::default();
        loop {
            let name_start = self.table.names.len();
            self.table.names.push_str(self.prefix);
            let key_start = self.table.names.len();
            if let Some(fields) = self.usual_entry(&mut first, &mut kind) {
                let name = self.name_from(name_start)?;
                self.add(name, fields)?;
                continue;
            }
            let more = self.json.next_key(&mut first, &mut self.table.names);
            if !more.map_err(|fault| self.fault(fault, JsonSection::Header))? {
                self.table.names.truncate(name_start);
                break;
            }
            if &self.table.names[key_start..] == METADATA_KEY {
                self.table.names.truncate(name_start);
                let duplicate = metadata.replace(self.metadata()?);
                if duplicate.is_some() {
                    return Err(
                        self.fault(JsonFault::Duplicate(METADATA_KEY.to_owned()), JsonSection::Header)
                    );
                }
                continue;
            }
            let name = self.name_from(name_start)?;
            let fields = self.tensor(name, &mut keys)?;
            self.add(name, fields)?;
        }
        self.json.finish().map_err(|fault| self.fault(fault, JsonSection::Header))?;
        self.table.note_beside(keys.held());
        Ok(metadata.unwrap_or_default())
    }

    /// The span of the last name, from `start` to the end of the table's names.
    fn name_from(&self, start: usize) -> Result<Span, CheckpointError> {
        let name = Span::tail(start, self.table.names.len());
        name.ok_or_else(|| self.too_many("bytes of tensor names"))
    }

    fn metadata(&mut self) -> Result<FileMetadata, CheckpointError> {
        let mut metadata = FileMetadata::default();
        self.metadata_entries(&mut metadata).map_err(|fault| self.fault(fault, JsonSection::Metadata))?;
        let held = metadata.finish();
        self.table
            .note_beside(held.map_err(|key| self.fault(JsonFault::Duplicate(key), JsonSection::Metadata))?);
        Ok(metadata)
    }

    fn metadata_entries(&mut self, metadata: &mut FileMetadata) -> Result<(), JsonFault> {
        self.json.open_object("an object of texts")?;
        let mut first = true;
        while self.json.next_key(&mut first, metadata.text())? {
            let middle = metadata.text().len();
            self.json.string(metadata.text(), "a text")?;
            if metadata.entry_is_complete(middle).is_none() {
                return Err(self.json.unexpected("less than 4 GiB of text"));
            }
        }
        Ok(())
    }

    /// Fast path: reads the next entry if it is a tensor in the usual spelling, and appends its
    /// name. Otherwise it reads nothing and clears `kind`, the dtype and shape of the previous
    /// entry.
    fn usual_entry(&mut self, first: &mut bool, kind: &mut Kind) -> Option<Fields> {
        let TensorTable { names, dims, .. } = &mut *self.table;
        let mut cursor = self.json.cursor();
        let dims_start = dims.len();
        let mut read = || {
            if !*first {
                cursor.token(b',')?;
            }
            let name = std::str::from_utf8(cursor.string()?).ok().filter(|&name| name != METADATA_KEY)?;
            kind.read(&mut cursor, dims)?;
            Some((name, usual_offsets(&mut cursor)?))
        };
        let Some((name, offsets)) = read() else {
            dims.truncate(dims_start);
            kind.spelled.clear();
            return None;
        };
        names.push_str(name);
        let place = cursor.place();
        self.json.advance_to(place);
        *first = false;
        Some(Fields { dtype: Some((kind.dtype, 0)), shape: Some(kind.shape), offsets: Some(offsets) })
    }

    /// Reads one tensor's object. Its name is the last in the table's names.
    fn tensor(&mut self, name: Span, keys: &mut OpenKeys) -> Result<Fields, CheckpointError> {
        keys.open(true);
        let mut fields = Fields::default();
        let outcome =
            self.fields(&mut fields, keys).and_then(|()| keys.close().map_err(FieldFault::duplicate));
        let tensor = |table: &TensorTable| kept(table.spelled(name));
        match outcome {
            Ok(()) => Ok(fields),
            Err(FieldFault::Json(fault)) => {
                let section = JsonSection::Tensor(tensor(self.table));
                Err(self.fault(fault, section))
            }
            Err(FieldFault::UnknownDType(UnknownDType { found })) => {
                let (path, found) = (self.path.to_owned(), kept(&found));
                Err(CheckpointError::UnknownDType { path, tensor: tensor(self.table), found })
            }
            Err(FieldFault::TooMany(what)) => Err(self.too_many(what)),
        }
    }

    /// Adds a tensor with these fields to the table.
    fn add(&mut self, name: Span, fields: Fields) -> Result<(), CheckpointError> {
        let tensor = |table: &TensorTable| kept(table.spelled(name));
        let missing = |field, table| CheckpointError::MissingField {
            path: self.path.to_owned(),
            tensor: tensor(table),
            field,
        };
        let Some((dtype, detail)) = fields.dtype else { return Err(missing("dtype", self.table)) };
        let Some(shape) = fields.shape else { return Err(missing("shape", self.table)) };
        let Some((start, end)) = fields.offsets else { return Err(missing("data_offsets", self.table)) };
        let record = Record { start, end, name, shape, detail, dtype };
        self.check_size(&record, || tensor(self.table))?;
        self.table.records.push(record);
        Ok(())
    }

    fn fields(&mut self, fields: &mut Fields, keys: &mut OpenKeys) -> Result<(), FieldFault> {
        self.json.open_object("an object with dtype, shape and data_offsets")?;
        let mut first = true;
        let mut seen = SeenFields::default();
        loop {
            // The key is appended to the names and removed again.
            let key_start = self.table.names.len();
            if !self.json.next_key(&mut first, &mut self.table.names)? {
                return Ok(());
            }
            let field = Field::of(&self.table.names[key_start..]);
            if field == Field::Unknown && !keys.push(&self.table.names[key_start..]) {
                return Err(FieldFault::TooMany("bytes of keys"));
            }
            self.table.names.truncate(key_start);
            seen.add(field)?;
            match field {
                Field::DType => fields.dtype = Some(self.dtype()?),
                Field::Shape => fields.shape = Some(self.shape()?),
                Field::Offsets => fields.offsets = Some(self.offsets()?),
                Field::Unknown => self.json.skip_value(keys)?,
            }
        }
    }

    fn dtype(&mut self) -> Result<(DType, u32), FieldFault> {
        let start = self.table.names.len();
        self.json.string(&mut self.table.names, "the name of a dtype")?;
        match self.table.names[start..].parse::<DType>() {
            Ok(dtype) => {
                self.table.names.truncate(start);
                Ok((dtype, 0))
            }
            Err(_) if self.allow_opaque => {
                let span = Span::tail(start, self.table.names.len());
                let span = span.ok_or(FieldFault::TooMany("bytes of tensor names"))?;
                // Neighbours mostly share their dtype's name.
                let known = self.table.opaque_names.last().copied();
                if known.is_some_and(|known| self.table.spelled(known) == self.table.spelled(span)) {
                    self.table.names.truncate(start);
                } else {
                    self.table.opaque_names.push(span);
                }
                let last = self.table.opaque_names.len() - 1;
                Ok((DType::Opaque, last.try_into().map_err(|_| FieldFault::TooMany("opaque dtypes"))?))
            }
            Err(unknown) => {
                self.table.names.truncate(start);
                Err(FieldFault::UnknownDType(unknown))
            }
        }
    }

    fn shape(&mut self) -> Result<Span, FieldFault> {
        let start = self.table.dims.len();
        self.json.open_array("an array of dimensions")?;
        let mut first = true;
        while self.json.next_element(&mut first)? {
            let dim = self.json.unsigned("a dimension: an integer from 0 to 2^64 - 1")?;
            self.table.dims.push(dim);
        }
        Span::tail(start, self.table.dims.len()).ok_or(FieldFault::TooMany("dimensions"))
    }

    fn offsets(&mut self) -> Result<(u64, u64), FieldFault> {
        const EXPECTED: &str = "an array of two offsets, integers from 0 to 2^64 - 1";
        self.json.open_array(EXPECTED)?;
        let mut first = true;
        let mut offsets = [0; 2];
        for offset in &mut offsets {
            if !self.json.next_element(&mut first)? {
                return Err(self.json.unexpected_before(EXPECTED, "one that is shorter").into());
            }
            *offset = self.json.unsigned(EXPECTED)?;
        }
        if self.json.next_element(&mut first)? {
            return Err(self.json.unexpected(EXPECTED).into());
        }
        Ok((offsets[0], offsets[1]))
    }

    /// Compares the bytes of dtype and shape with the span of the offsets.
    fn check_size(&self, record: &Record, tensor: impl Fn() -> String) -> Result<(), CheckpointError> {
        let (start, end) = (record.start, record.end);
        let path = || self.path.to_owned();
        let Some(found_bytes) = end.checked_sub(start) else {
            return Err(CheckpointError::ReversedOffsets { path: path(), tensor: tensor(), start, end });
        };
        let dtype = record.dtype;
        let Some(element_bits) = dtype.bits() else { return Ok(()) };
        // Same dtype, shape and length as the previous tensor, which was checked.
        let before = self.table.records.last().map(|last| (last.dtype, last.shape, last.end - last.start));
        if before == Some((dtype, record.shape, found_bytes)) {
            return Ok(());
        }
        let shape = self.table.shape(record.shape);
        let Some(bits) = total_bits(shape, element_bits) else {
            let shape = shape_text(shape);
            return Err(CheckpointError::SizeOverflow { path: path(), tensor: tensor(), dtype, shape });
        };
        if !bits.is_multiple_of(8) {
            let shape = shape_text(shape);
            return Err(CheckpointError::PartialByte { path: path(), tensor: tensor(), dtype, shape, bits });
        }
        let expected_bytes = bits / 8;
        if expected_bytes != found_bytes {
            let (path, tensor, shape) = (path(), tensor(), shape_text(shape));
            return Err(CheckpointError::SizeMismatch {
                path,
                tensor,
                dtype,
                shape,
                expected_bytes,
                found_bytes,
            });
        }
        Ok(())
    }

    fn too_many(&self, what: &'static str) -> CheckpointError {
        CheckpointError::TooMany { path: self.path.to_owned(), what, limit: u64::from(u32::MAX) }
    }

    fn fault(&self, fault: JsonFault, section: JsonSection) -> CheckpointError {
        fault.at(self.path, section)
    }
}

/// The longest spelling of dtype and shape that is kept for comparison with the next tensor.
const KIND_BYTES_MAX: usize = 256;

/// Dtype and shape of the previous tensor, with the bytes they were read from (from its name to its
/// offsets). Neighbours mostly share them, and comparing bytes is faster than parsing again.
struct Kind {
    /// Empty if there is none.
    spelled: Vec<u8>,
    dtype: DType,
    shape: Span,
}

impl Default for Kind {
    fn default() -> Self {
        Self { spelled: Vec::new(), dtype: DType::Bf16, shape: Span::default() }
    }
}

impl Kind {
    /// Reads a tensor's object up to its offsets, if its fields are in the usual order. A new shape
    /// is appended to `dims`. On failure the caller restores `dims` and clears this kind.
    fn read(&mut self, cursor: &mut Cursor<'_>, dims: &mut Vec<u64>) -> Option<()> {
        if !self.spelled.is_empty() && cursor.skip(&self.spelled) {
            return Some(());
        }
        let start = cursor.place();
        cursor.token(b':')?;
        cursor.token(b'{')?;
        cursor.key(b"\"dtype\"")?;
        let name = cursor.string()?;
        let is_called = |dtype: &DType| dtype.name().as_bytes() == name;
        // Opaque dtypes have no name here, so they are never found.
        self.dtype = Some(self.dtype).filter(is_called).or_else(|| DType::ALL.into_iter().find(is_called))?;
        cursor.token(b',')?;
        cursor.key(b"\"shape\"")?;
        let dims_start = dims.len();
        cursor.array(dims)?;
        self.shape = Span::tail(dims_start, dims.len())?;
        cursor.token(b',')?;
        cursor.key(b"\"data_offsets\"")?;
        self.spelled.clear();
        let spelled = cursor.since(start);
        if spelled.len() <= KIND_BYTES_MAX {
            self.spelled.extend_from_slice(spelled);
        }
        Some(())
    }
}

/// Reads the value of `data_offsets` and the end of the object.
fn usual_offsets(cursor: &mut Cursor<'_>) -> Option<(u64, u64)> {
    cursor.token(b'[')?;
    let start = cursor.unsigned()?;
    cursor.token(b',')?;
    let end = cursor.unsigned()?;
    cursor.token(b']')?;
    cursor.token(b'}')?;
    Some((start, end))
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Field {
    DType,
    Shape,
    Offsets,
    Unknown,
}

impl Field {
    fn of(key: &str) -> Self {
        match key {
            "dtype" => Self::DType,
            "shape" => Self::Shape,
            "data_offsets" => Self::Offsets,
            _ => Self::Unknown,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::DType => "dtype",
            Self::Shape => "shape",
            Self::Offsets => "data_offsets",
            Self::Unknown => "",
        }
    }
}

/// Which of the three fields have occurred.
#[derive(Default)]
struct SeenFields {
    seen: [bool; 3],
}

impl SeenFields {
    fn add(&mut self, field: Field) -> Result<(), FieldFault> {
        let slot = match field {
            Field::DType => 0,
            Field::Shape => 1,
            Field::Offsets => 2,
            Field::Unknown => return Ok(()),
        };
        if std::mem::replace(&mut self.seen[slot], true) {
            return Err(FieldFault::duplicate(field.name().to_owned()));
        }
        Ok(())
    }
}

/// A fault inside a tensor's object. The caller adds the tensor's name.
enum FieldFault {
    Json(JsonFault),
    UnknownDType(UnknownDType),
    TooMany(&'static str),
}

impl FieldFault {
    fn duplicate(key: String) -> Self {
        Self::Json(JsonFault::Duplicate(key))
    }
}

impl From<JsonFault> for FieldFault {
    fn from(fault: JsonFault) -> Self {
        Self::Json(fault)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Found = (String, DType, Vec<u64>, (u64, u64));

    /// Reads a header's text through a buffer of `buffer_bytes`. With one byte, the fast path never
    /// applies.
    fn read(text: &str, buffer_bytes: usize) -> Result<TensorTable, CheckpointError> {
        let mut table = TensorTable::default();
        let json = JsonReader::new(text.as_bytes(), 0, buffer_bytes);
        let path = Path::new("x.safetensors");
        HeaderParser { path, prefix: "p/", allow_opaque: true, json, table: &mut table }.parse()?;
        Ok(table)
    }

    /// The tensors of a header's text, and the number of stored dimensions.
    fn parsed(text: &str, buffer_bytes: usize) -> (Vec<Found>, usize) {
        let table = read(text, buffer_bytes).unwrap();
        let found = |record: &Record| {
            let shape = table.shape(record.shape).to_vec();
            (table.spelled(record.name).to_owned(), record.dtype, shape, (record.start, record.end))
        };
        (table.records.iter().map(found).collect(), table.dims.len())
    }

    #[test]
    fn kinds_that_are_compared_are_those_that_are_read() {
        let plain = |name: &str, shape: &str, start: u64, end: u64| {
            format!(r#""{name}":{{"dtype":"U8","shape":[{shape}],"data_offsets":[{start},{end}]}}"#)
        };
        let ones = "1,".repeat(200) + "3";
        let text = [
            plain("a", "2,3", 0, 6),
            plain("alike", "2,3", 6, 12),
            plain("other", "3", 12, 15),
            plain("as long", "4", 15, 19),
            plain("longer", "45", 19, 64),
            // The fast path fails at its end, so that its shape is removed again.
            r#""more":{"dtype":"U8","shape":[5],"data_offsets":[64,69],"x":1}"#.to_owned(),
            plain("as it", "5", 69, 74),
            r#""turned":{"data_offsets":[74,79],"shape":[5],"dtype":"U8"}"#.to_owned(),
            plain("as that", "5", 79, 84),
            r#""__metadata__":{"dtype":"U8","shape":"[5]"}"#.to_owned(),
            r#" "wide" : { "dtype" : "U8" , "shape" : [5] , "data_offsets" : [84, 89] } "#.to_owned(),
            r#" "wide too" : { "dtype" : "U8" , "shape" : [5] , "data_offsets" : [89, 94] } "#.to_owned(),
            r#""opaque":{"dtype":"U9","shape":[5],"data_offsets":[94,95]}"#.to_owned(),
            plain("long", &ones, 95, 98),
            plain("long too", &ones, 98, 101),
            plain("scalar", "", 101, 102),
            plain("scalar too", "", 102, 103),
            plain("five", "5", 103, 108),
            // Same dtype and shape, but the fast path fails at its end.
            r#""five more":{"dtype":"U8","shape":[5],"data_offsets":[108,113],"x":1}"#.to_owned(),
            plain("five again", "5", 113, 118),
        ];
        let text = format!("{{{}}}", text.join(","));
        let (carefully, dims) = parsed(&text, 1);
        assert_eq!(carefully.len(), 19);
        assert_eq!(carefully[1], ("p/alike".to_owned(), DType::U8, vec![2, 3], (6, 12)));
        assert_eq!(carefully[6], ("p/as it".to_owned(), DType::U8, vec![5], (69, 74)));
        for buffer_bytes in (2..text.len() + 2).chain([1 << 16]) {
            assert_eq!(parsed(&text, buffer_bytes).0, carefully, "{buffer_bytes}");
        }
        // Shared: the shapes of "alike" and "wide too". "as it" and "five again" follow an unusual
        // entry.
        assert_eq!(parsed(&text, 1 << 16).1, dims - 2 - 1);
    }

    #[test]
    fn kinds_that_are_alike_have_their_sizes_compared() {
        let text = |end: &str| {
            format!(
                r#"{{"a":{{"dtype":"U8","shape":[6],"data_offsets":[0,6]}},"b":{{"dtype":"U8","shape":[6],"data_offsets":[6,{end}]}}}}"#
            )
        };
        let outcome = |end: &str| read(&text(end), 1 << 16);
        assert!(outcome("12").is_ok());
        for (end, expected) in [("13", 7), ("11", 5), ("6", 0)] {
            let Err(CheckpointError::SizeMismatch { expected_bytes: 6, found_bytes, .. }) = outcome(end)
            else {
                panic!("{end}")
            };
            assert_eq!(found_bytes, expected);
        }
        assert!(matches!(outcome("5"), Err(CheckpointError::ReversedOffsets { start: 6, end: 5, .. })));
        for end in ["1e1", "12.0", "012", "18446744073709551616"] {
            assert!(matches!(outcome(end), Err(CheckpointError::Syntax { .. })), "{end}");
        }
    }

    #[test]
    fn sizes_do_not_depend_on_the_order_of_dimensions() {
        assert_eq!(total_bits(&[], 16), Some(16));
        assert_eq!(total_bits(&[0], 16), Some(0));
        assert_eq!(total_bits(&[3, 5], 4), Some(60));
        let big = 1 << 62;
        for shape in [[0, big, 4], [big, 4, 0], [4, 0, big]] {
            assert_eq!(total_bits(&shape, 8), None, "{shape:?}");
        }
        assert_eq!(total_bits(&[u64::MAX], 1), Some(u64::MAX));
        assert_eq!(total_bits(&[u64::MAX], 4), None);
    }
}
