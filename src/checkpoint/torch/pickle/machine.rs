//! Runs a pickle: a stack of values, marks, and a memo. It makes values and calls nothing.
//!
//! The second pass through the text; [`scan`](super::scan) was the first. The machine does not
//! recurse: nesting is a list of marks. Its own lists grow through the meter of the arena.

use super::super::stream::{Fault, Stream};
use super::arena::{Arena, Chain, Full, Item, Ref, Watermark};
use super::class::Known;
use super::object::{self, Refusal};
use super::opcode::{self, Argument, argument};
use super::scan::{Fetched, decimal};

mod literal;

/// Gives the values that a pickle leaves to its file: storages, and whole tensors in old files.
pub(in super::super) trait Persistent {
    /// The value with this identity; a reason if there is none.
    fn load(&mut self, arena: &mut Arena, id: Ref) -> Result<Ref, Refusal>;
}

/// An opened group of values.
#[derive(Clone, Copy)]
struct Mark {
    /// Values on the stack before it.
    below: usize,
    watermark: Watermark,
}

/// The values that are fetched from the memo.
struct Memo {
    fetched: Fetched,
    values: Vec<Option<Ref>>,
    /// Values that were numbered by their order.
    counted: u32,
    /// True if a value came with its number.
    numbered: bool,
}

pub(super) struct Machine<'a, 'b, P> {
    stream: &'a mut Stream<'b>,
    arena: &'a mut Arena,
    persistent: &'a mut P,
    stack: Vec<Ref>,
    marks: Vec<Mark>,
    memo: Memo,
    /// The tuple that the last opcode made, and what was there before its first value.
    fresh: Option<(Ref, Watermark)>,
    /// One past the end of the current frame.
    frame_end: u64,
    /// The offset of the current opcode.
    at: u64,
}

impl<'a, 'b, P: Persistent> Machine<'a, 'b, P> {
    pub(super) fn new(
        stream: &'a mut Stream<'b>,
        arena: &'a mut Arena,
        persistent: &'a mut P,
        fetched: Fetched,
    ) -> Self {
        let values = vec![None; fetched.len()];
        let memo = Memo { fetched, values, counted: 0, numbered: false };
        let (stack, marks) = (Vec::new(), Vec::new());
        Self { stream, arena, persistent, stack, marks, memo, fresh: None, frame_end: 0, at: 0 }
    }

    /// Runs to the end and returns the value.
    pub(super) fn run(mut self) -> Result<Ref, Fault> {
        loop {
            self.at = self.stream.offset();
            let opcode = self.stream.byte()?;
            if opcode == opcode::STOP {
                let value = self.pop()?;
                return match (self.stack.is_empty(), self.marks.is_empty()) {
                    (true, true) => Ok(value),
                    _ => Err(self.invalid("expected one value at the end of the pickle, found several")),
                };
            }
            self.step(opcode)?;
        }
    }

    /// Most of a checkpoint is these opcodes.
    fn step(&mut self, opcode: u8) -> Result<(), Fault> {
        let fresh = self.fresh.take();
        match opcode {
            opcode::BINPUT => {
                self.fresh = fresh;
                let index = u32::from(self.stream.byte()?);
                self.put(index)
            }
            opcode::LONG_BINPUT => {
                self.fresh = fresh;
                let index = u32::from_le_bytes(self.stream.array()?);
                self.put(index)
            }
            opcode::MEMOIZE => {
                self.fresh = fresh;
                self.memoize()
            }
            opcode::BINGET => {
                let index = u32::from(self.stream.byte()?);
                self.get(index)
            }
            opcode::LONG_BINGET => {
                let index = u32::from_le_bytes(self.stream.array()?);
                self.get(index)
            }
            opcode::MARK => self.mark(),
            opcode::TUPLE => {
                let (values, mark) = self.pop_mark()?;
                let tuple = self.tuple(values)?;
                self.fresh = Some((tuple, mark.watermark));
                Ok(())
            }
            opcode::TUPLE1 => self.tuple_of(1),
            opcode::TUPLE2 => self.tuple_of(2),
            opcode::TUPLE3 => self.tuple_of(3),
            opcode::EMPTY_TUPLE => self.tuple_of(0),
            opcode::BINUNICODE | opcode::SHORT_BINUNICODE | opcode::BINUNICODE8 => self.text(opcode),
            opcode::BININT1 => {
                let value = i64::from(self.stream.byte()?);
                self.push_int(value)
            }
            opcode::BININT2 => {
                let value = i64::from(u16::from_le_bytes(self.stream.array()?));
                self.push_int(value)
            }
            opcode::BININT => {
                let value = i64::from(i32::from_le_bytes(self.stream.array()?));
                self.push_int(value)
            }
            opcode::NEWFALSE => self.push(Ref::FALSE),
            opcode::NEWTRUE => self.push(Ref::TRUE),
            opcode::NONE => self.push(Ref::NONE),
            opcode::REDUCE => self.reduce(fresh),
            opcode::BINPERSID => {
                let id = self.pop()?;
                self.persistent(id)
            }
            other => self.other(other),
        }
    }

    fn other(&mut self, opcode: u8) -> Result<(), Fault> {
        match opcode {
            opcode::EMPTY_DICT => self.push_item(Item::Dict(Chain::EMPTY)),
            opcode::EMPTY_LIST => self.push_item(Item::List(Chain::EMPTY)),
            opcode::EMPTY_SET => self.push_item(Item::Set(Chain::EMPTY)),
            opcode::SETITEMS | opcode::APPENDS | opcode::ADDITEMS => {
                let (values, _) = self.pop_mark()?;
                self.extend(opcode, values)
            }
            opcode::SETITEM => {
                let values = self.below(2)?;
                self.extend(opcode, values)
            }
            opcode::APPEND => {
                let values = self.below(1)?;
                self.extend(opcode, values)
            }
            opcode::BUILD => {
                let state = self.pop()?;
                let target = self.top()?;
                let built = object::build(self.arena, target, state);
                self.check(built)
            }
            opcode::NEWOBJ | opcode::NEWOBJ_EX => self.new_object(opcode),
            opcode::GLOBAL => self.global(),
            opcode::STACK_GLOBAL => self.stack_global(),
            opcode::LONG1 | opcode::LONG4 => self.long(opcode),
            opcode::BINFLOAT => {
                self.stream.skip(8)?;
                self.push(Ref::PLAIN)
            }
            opcode::SHORT_BINSTRING | opcode::BINSTRING => self.text(opcode),
            opcode::SHORT_BINBYTES | opcode::BINBYTES | opcode::BINBYTES8 | opcode::BYTEARRAY8 => {
                self.skip_counted(opcode)?;
                self.push(Ref::PLAIN)
            }
            opcode::PROTO => match self.stream.byte()? {
                0..=5 => Ok(()),
                found => Err(self.invalid(format!("expected pickle protocol 0 to 5, found {found}"))),
            },
            opcode::FRAME => self.frame(),
            opcode::POP => self.pop_one(),
            opcode::POP_MARK => {
                let (values, _) = self.pop_mark()?;
                self.stack.truncate(values);
                Ok(())
            }
            opcode::DUP => {
                let top = self.top()?;
                self.push(top)
            }
            other => self.textual(other),
        }
    }

    /// Opcodes of protocols 0 and 1, and rare ones.
    fn textual(&mut self, opcode: u8) -> Result<(), Fault> {
        match opcode {
            opcode::DICT | opcode::LIST | opcode::FROZENSET => {
                let (values, _) = self.pop_mark()?;
                let (item, opcode) = match opcode {
                    opcode::DICT => (Item::Dict(Chain::EMPTY), opcode::SETITEMS),
                    opcode::LIST => (Item::List(Chain::EMPTY), opcode::APPENDS),
                    _ => (Item::Set(Chain::EMPTY), opcode::ADDITEMS),
                };
                let container = self.made(item)?;
                self.grow_stack()?;
                self.stack.insert(values, container);
                self.extend(opcode, values + 1)
            }
            opcode::OBJ => {
                let (values, _) = self.pop_mark()?;
                let Some(&class) = self.stack.get(values) else {
                    return Err(self.invalid("expected a class behind the mark, found nothing"));
                };
                let arguments = self.stack[values + 1..].to_vec();
                self.stack.truncate(values);
                self.construct(class, &arguments)
            }
            opcode::INST => {
                let class = self.class_of_lines()?;
                let (values, _) = self.pop_mark()?;
                let arguments = self.stack[values..].to_vec();
                self.stack.truncate(values);
                self.construct(class, &arguments)
            }
            opcode::PUT => {
                let index = decimal(self.stream)?;
                self.put(index)
            }
            opcode::GET => {
                let index = decimal(self.stream)?;
                self.get(index)
            }
            opcode::INT | opcode::LONG => self.digits(),
            opcode::FLOAT => {
                self.stream.line()?;
                self.push(Ref::PLAIN)
            }
            opcode::STRING | opcode::UNICODE => self.quoted(opcode),
            opcode::EXT1 | opcode::EXT2 | opcode::EXT4 => {
                if let Some(Argument::Bytes(count)) = argument(opcode) {
                    self.stream.skip(u64::from(count))?;
                }
                self.class("copyreg", "extension")
            }
            opcode::PERSID => Err(self.invalid("expected a persistent identity of torch, found a text")),
            other => Err(self.invalid(format!("expected an opcode of pickle, found byte 0x{other:02x}"))),
        }
    }
}

/// The stack and the memo.
impl<P: Persistent> Machine<'_, '_, P> {
    fn invalid(&self, reason: impl Into<String>) -> Fault {
        Box::new(self.stream.input().invalid(self.at, reason))
    }

    fn full(&self) -> Fault {
        super::fault(self.stream.input(), self.arena, self.at, Refusal::Full)
    }

    #[inline]
    fn made(&mut self, item: Item) -> Result<Ref, Fault> {
        self.arena.push(item).map_err(|Full| self.full())
    }

    fn check<T>(&self, outcome: Result<T, Refusal>) -> Result<T, Fault> {
        outcome.map_err(|refusal| super::fault(self.stream.input(), self.arena, self.at, refusal))
    }

    #[inline]
    fn grow_stack(&mut self) -> Result<(), Fault> {
        if self.stack.len() == self.stack.capacity() {
            self.arena.meter.grow(&mut self.stack, 1).map_err(|Full| self.full())?;
        }
        Ok(())
    }

    #[inline]
    fn push(&mut self, value: Ref) -> Result<(), Fault> {
        self.grow_stack()?;
        self.stack.push(value);
        Ok(())
    }

    fn push_item(&mut self, item: Item) -> Result<(), Fault> {
        let value = self.made(item)?;
        self.push(value)
    }

    fn push_int(&mut self, value: i64) -> Result<(), Fault> {
        let value = self.arena.push_int(value).map_err(|Full| self.full())?;
        self.push(value)
    }

    /// The position on the stack of the last `count` values; they are above the last mark.
    #[inline]
    fn below(&self, count: usize) -> Result<usize, Fault> {
        let floor = self.marks.last().map_or(0, |mark| mark.below);
        let start = self.stack.len().checked_sub(count).filter(|start| *start >= floor);
        start.ok_or_else(|| self.invalid(format!("expected {count} values on the stack, found fewer")))
    }

    #[inline]
    fn pop(&mut self) -> Result<Ref, Fault> {
        let start = self.below(1)?;
        let value = self.stack[start];
        self.stack.truncate(start);
        Ok(value)
    }

    #[inline]
    fn top(&self) -> Result<Ref, Fault> {
        Ok(self.stack[self.below(1)?])
    }

    /// Removes a value, or a mark that has none above it.
    fn pop_one(&mut self) -> Result<(), Fault> {
        match self.marks.last() {
            Some(mark) if mark.below == self.stack.len() => {
                self.marks.pop();
                Ok(())
            }
            _ => self.pop().map(drop),
        }
    }

    fn mark(&mut self) -> Result<(), Fault> {
        if self.marks.len() == self.marks.capacity() {
            self.arena.meter.grow(&mut self.marks, 1).map_err(|Full| self.full())?;
        }
        self.marks.push(Mark { below: self.stack.len(), watermark: self.arena.watermark() });
        Ok(())
    }

    /// Removes the last mark. Returns where its values begin on the stack.
    fn pop_mark(&mut self) -> Result<(usize, Mark), Fault> {
        let mark =
            self.marks.pop().ok_or_else(|| self.invalid("expected a mark on the stack, found none"))?;
        Ok((mark.below, mark))
    }

    fn tuple_of(&mut self, count: usize) -> Result<(), Fault> {
        let start = self.below(count)?;
        self.tuple(start).map(drop)
    }

    /// Makes a tuple of the values from `start` on.
    fn tuple(&mut self, start: usize) -> Result<Ref, Fault> {
        let values = self.arena.push_values(&self.stack[start..]).map_err(|Full| self.full())?;
        self.stack.truncate(start);
        let tuple = self.made(Item::Tuple(values))?;
        self.push(tuple)?;
        Ok(tuple)
    }

    /// Adds the values from `start` on to the container before them.
    fn extend(&mut self, opcode: u8, start: usize) -> Result<(), Fault> {
        let floor = self.marks.last().map_or(0, |mark| mark.below);
        let Some(place) = start.checked_sub(1).filter(|place| *place >= floor) else {
            return Err(self.invalid("expected a container before the values, found nothing"));
        };
        let extended = object::extend(self.arena, opcode, self.stack[place], &self.stack[start..]);
        self.check(extended)?;
        self.stack.truncate(start);
        Ok(())
    }

    #[inline]
    fn put(&mut self, index: u32) -> Result<(), Fault> {
        let value = self.top()?;
        if self.memo.counted > 0 {
            return Err(self.invalid("expected one way to fill the memo, found two"));
        }
        self.memo.numbered = true;
        self.remember(index, value);
        Ok(())
    }

    fn memoize(&mut self) -> Result<(), Fault> {
        let value = self.top()?;
        if self.memo.numbered {
            return Err(self.invalid("expected one way to fill the memo, found two"));
        }
        self.remember(self.memo.counted, value);
        self.memo.counted += 1;
        Ok(())
    }

    #[inline]
    fn remember(&mut self, index: u32, value: Ref) {
        if let Some(place) = self.memo.fetched.place(index) {
            self.memo.values[place] = Some(value);
            self.arena.pin();
        }
    }

    #[inline]
    fn get(&mut self, index: u32) -> Result<(), Fault> {
        let place = self.memo.fetched.place(index).expect("the first pass has met this index");
        match self.memo.values[place] {
            Some(value) => self.push(value),
            None => Err(self.invalid(format!("expected a value in the memo at {index}, found none"))),
        }
    }
}

/// Classes and objects.
impl<P: Persistent> Machine<'_, '_, P> {
    fn class(&mut self, module: &str, name: &str) -> Result<(), Fault> {
        let class = self.made_class(module, name)?;
        self.push(class)
    }

    fn made_class(&mut self, module: &str, name: &str) -> Result<Ref, Fault> {
        let known = Known::of(module, name);
        let full_name = format!("{module}.{name}");
        if known.is_stranger() {
            self.arena.note_stranger(&full_name);
        }
        let name = self.arena.push_text(&full_name).map_err(|Full| self.full())?;
        self.made(Item::Class { name, known })
    }

    fn class_of_lines(&mut self) -> Result<Ref, Fault> {
        let mut line = || -> Result<String, Fault> {
            let text = self.stream.line()?;
            let text = std::str::from_utf8(text).map(str::to_owned);
            text.map_err(|_| self.stream.invalid("expected the name of a class as text before this"))
        };
        let (module, name) = (line()?, line()?);
        self.made_class(&module, &name)
    }

    fn global(&mut self) -> Result<(), Fault> {
        let class = self.class_of_lines()?;
        self.push(class)
    }

    fn stack_global(&mut self) -> Result<(), Fault> {
        let start = self.below(2)?;
        let texts = (self.arena.text_of(self.stack[start]), self.arena.text_of(self.stack[start + 1]));
        let (Some(module), Some(name)) = texts else {
            return Err(self.invalid("expected the names of a module and a class, found something else"));
        };
        let (module, name) = (module.to_owned(), name.to_owned());
        self.stack.truncate(start);
        self.class(&module, &name)
    }

    fn persistent(&mut self, id: Ref) -> Result<(), Fault> {
        let loaded = self.persistent.load(self.arena, id);
        let value = self.check(loaded)?;
        self.push(value)
    }

    /// A call, which is not made.
    fn reduce(&mut self, fresh: Option<(Ref, Watermark)>) -> Result<(), Fault> {
        let start = self.below(2)?;
        let (class, arguments) = (self.stack[start], self.stack[start + 1]);
        let made = object::reduce(self.arena, class, arguments);
        let item = self.check(made)?;
        // Nothing refers to the parts of a tensor but its tuple of arguments, which is gone now.
        if let (Item::Tensor(_), Some((tuple, watermark))) = (item, fresh)
            && tuple == arguments
        {
            self.arena.rewind(watermark);
        }
        self.stack.truncate(start);
        self.push_item(item)
    }

    fn new_object(&mut self, opcode: u8) -> Result<(), Fault> {
        let arguments = if opcode == opcode::NEWOBJ { 1 } else { 2 };
        let start = self.below(1 + arguments)?;
        let class = self.stack[start];
        let made = match opcode {
            opcode::NEWOBJ => object::reduce(self.arena, class, self.stack[start + 1]),
            _ => object::opaque(self.arena, class, &self.stack[start + 1..]).map_err(Refusal::from),
        };
        let item = self.check(made)?;
        self.stack.truncate(start);
        self.push_item(item)
    }

    fn construct(&mut self, class: Ref, arguments: &[Ref]) -> Result<(), Fault> {
        let arguments = self.arena.push_values(arguments).map_err(|Full| self.full())?;
        let arguments = self.made(Item::Tuple(arguments))?;
        let made = object::reduce(self.arena, class, arguments);
        let item = self.check(made)?;
        self.push_item(item)
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::super::CheckpointError;
    use super::super::super::testing::with_file;
    use super::super::read;
    use super::*;
    use crate::units::ByteRange;

    /// Gives a number for each storage.
    struct Numbers;

    impl Persistent for Numbers {
        fn load(&mut self, arena: &mut Arena, id: Ref) -> Result<Ref, Refusal> {
            match arena.item(id) {
                Item::Int(count) => {
                    let (element, count) =
                        (super::super::super::element::Element::BYTE, count.unsigned_abs());
                    Ok(arena.push(Item::Storage { element, id: 0, count })?)
                }
                _ => Err(Refusal::Invalid("no number".to_owned())),
            }
        }
    }

    fn run(pickle: &[u8]) -> Result<(Arena, Ref), CheckpointError> {
        with_file(pickle, |input| {
            let mut arena = Arena::new(1 << 20);
            let text = ByteRange::new(0, input.len_bytes).unwrap();
            let (value, end) = read(input, text, &mut arena, &mut Numbers).map_err(|fault| *fault)?;
            assert_eq!(end, input.len_bytes);
            Ok((arena, value))
        })
    }

    /// The value as text, as Python would print it.
    fn shown(arena: &Arena, value: Ref) -> String {
        let list = |values: Vec<Ref>| -> String {
            let values: Vec<String> = values.into_iter().map(|value| shown(arena, value)).collect();
            values.join(", ")
        };
        let flat = |chain: Chain| arena.chunks(chain).flatten().copied().collect();
        match arena.item(value) {
            Item::Text(text) => format!("{:?}", arena.text(text)),
            Item::Int(value) => value.to_string(),
            Item::Tuple(values) => format!("({})", list(arena.values(values).to_vec())),
            Item::List(chain) => format!("[{}]", list(flat(chain))),
            Item::Dict(chain) => format!("{{{}}}", list(flat(chain))),
            Item::Set(chain) => format!("set({})", list(flat(chain))),
            Item::Class { name, .. } => arena.text(name).to_owned(),
            Item::Object { class, parts } => format!("{}<{}>", shown(arena, class), list(flat(parts))),
            other => format!("{other:?}"),
        }
    }

    #[test]
    fn values_of_all_protocols_are_understood() {
        let rows: [(&[u8], &str); 32] = [
            (b"N.", "None"),
            (b"I01\n.", "Bool(true)"),
            (b"I00\n.", "Bool(false)"),
            (b"I-12\n.", "-12"),
            (b"L99999999999L\n.", "99999999999"),
            (b"L99999999999999999999L\n.", "Plain"),
            (b"F1e3\n.", "Plain"),
            (b"J\xfe\xff\xff\xff.", "-2"),
            (b"M\x01\x02.", "513"),
            (b"\x8a\0.", "0"),
            (b"\x8a\x01\xff.", "-1"),
            (b"\x8a\x02\xff\x00.", "255"),
            (b"\x8a\x08\0\0\0\0\0\0\0\x80.", "-9223372036854775808"),
            (b"\x8a\x09\0\0\0\0\0\0\0\x80\0.", "Plain"),
            (b"\x8b\x01\0\0\0\x07.", "7"),
            (b"S'ab'\n.", r#""ab""#),
            (b"S\"a'b\"\n.", r#""a'b""#),
            (b"Vab c\n.", r#""ab c""#),
            (b"U\x02ab.", r#""ab""#),
            (b"U\x02\xff\xfe.", "Plain"),
            (b"\x8c\x02ab.", r#""ab""#),
            (b"\x8d\x02\0\0\0\0\0\0\0ab.", r#""ab""#),
            (b"](K\x01K\x02ea.", "error"),
            (b"](K\x01K\x02eK\x03a.", "[1, 2, 3]"),
            (b"}(K\x01K\x02uK\x03K\x04s.", "{1, 2, 3, 4}"),
            (b"\x8f(K\x01\x90.", "set(1)"),
            (b"(K\x01K\x02\x91.", "set(1, 2)"),
            (b"(K\x01]d.", "{1, []}"),
            (b"(K\x01)l.", "[1, ()]"),
            (b"K\x05q\x010(h\x01h\x012t.", "(5, 5, 5)"),
            (b"\x80\x04\x95\x05\0\0\0\0\0\0\0K\x05\x94h\0\x86.", "(5, 5)"),
            (b"(NN1K\x09.", "9"),
        ];
        for (pickle, expected) in rows {
            let found =
                run(pickle).map_or_else(|_| "error".to_owned(), |(arena, value)| shown(&arena, value));
            assert_eq!(found, expected, "{}", pickle.escape_ascii());
        }
    }

    #[test]
    fn calls_give_objects_and_nothing_else() {
        let rows: [(&[u8], &str); 12] = [
            (b"cos\nsystem\n(X\x01\0\0\0atR.", r#"os.system<("a")>"#),
            (b"cos\nsystem\n)R}K\x01K\x02sb.", "os.system<(), {1, 2}>"),
            (b"X\x01\0\0\0aX\x01\0\0\0b\x93)R.", "a.b<()>"),
            (b"(K\x01ia\nb\n.", "a.b<(1)>"),
            (b"(ca\nb\nK\x01o.", "a.b<(1)>"),
            (b"ca\nb\n)\x81.", "a.b<()>"),
            (b"ca\nb\n)}\x92.", "a.b<(), {}>"),
            (b"ca\nb\n)R)R.", "a.b<()><()>"),
            (b"ca\nb\n)R(K\x01eK\x02a.", "a.b<(), 1, 2>"),
            (b"ca\nb\nNR.", "a.b<None>"),
            (b"ccollections\nOrderedDict\n(](]K\x01aK\x02a]K\x03aK\x04aetR.", "{1, 2, 3, 4}"),
            (b"ccollections\ndefaultdict\n(c__builtin__\nlist\ntRK\x01K\x02s.", "{1, 2}"),
        ];
        for (pickle, expected) in rows {
            let (arena, value) = run(pickle).unwrap();
            assert_eq!(shown(&arena, value), expected, "{}", pickle.escape_ascii());
        }
    }

    #[test]
    fn the_parts_of_a_tensor_are_removed() {
        let tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(K\x08QK\0K\x02K\x04\x86K\x04K\x01\x86\x89Nt";
        let many = |before: &[u8], after: &[u8]| {
            let one = [before, tensor, after, b"R"].concat();
            let pickle = [b"(", &one.repeat(1000)[..], b"t."].concat();
            run(&pickle).unwrap().0.len()
        };
        // A class and a tensor stay of each.
        assert_eq!(many(b"", b"q\x01"), 2001);
        // What goes to the memo and is fetched again stays with all that was made with it.
        assert!(many(b"", b"q\x010h\x01") > 4000);
        // A list from before that learns of a part.
        let kept = [b"(]q\x010", &tensor[..tensor.len() - 1], b"h\x01K\x01\x85a0tR", b"h\x01t."].concat();
        let (arena, value) = run(&kept).unwrap();
        assert!(shown(&arena, value).ends_with("[(1)])"), "{}", shown(&arena, value));
    }
}
