//! Runs a pickle: a stack of values, marks, and a memo. It makes values and calls nothing.
//!
//! The second pass through the text; [`scan`](super::scan) was the first. The machine does not
//! recurse: nesting is a list of marks. Its own lists grow through the meter of the arena.

use super::super::stream::{Fault, Stream, TAKE_BYTES_MAX};
use super::arena::{Arena, Chain, Full, Item, Ref, Watermark};
use super::class::Known;
use super::object::{self, Refusal};
use super::opcode::{self, Argument, argument};
use super::scan::{Fetched, count, decimal};
use crate::units::to_usize;

/// Texts up to this length may be names; longer ones are skipped.
const TEXT_BYTES_MAX: u64 = 32 << 10;

const _: () = assert!(TEXT_BYTES_MAX <= 64 << 10 && TAKE_BYTES_MAX == 64 << 10);

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

/// Numbers, texts, frames.
impl<P: Persistent> Machine<'_, '_, P> {
    #[inline]
    fn counted(&mut self, opcode: u8) -> Result<u64, Fault> {
        let Some(Argument::Counted(width)) = argument(opcode) else {
            return Err(self.invalid("expected an opcode with a length"));
        };
        count(self.stream, width)
    }

    fn skip_counted(&mut self, opcode: u8) -> Result<(), Fault> {
        let count = self.counted(opcode)?;
        self.stream.skip(count)
    }

    fn text(&mut self, opcode: u8) -> Result<(), Fault> {
        let count = self.counted(opcode)?;
        if count > TEXT_BYTES_MAX {
            self.stream.skip(count)?;
            return self.push(Ref::PLAIN);
        }
        let text = self.stream.take(to_usize(count))?;
        let Ok(text) = std::str::from_utf8(text) else {
            return self.push(Ref::PLAIN);
        };
        let pushed = self.arena.push_text(text);
        let slice = pushed.map_err(|Full| self.full())?;
        self.push_item(Item::Text(slice))
    }

    /// A text of protocol 0, in quotes or to the end of the line. With escapes it is not read.
    fn quoted(&mut self, opcode: u8) -> Result<(), Fault> {
        let line = self.stream.line()?;
        let text = match (opcode, line) {
            (opcode::STRING, [b'\'', text @ .., b'\''] | [b'"', text @ .., b'"']) => text,
            (opcode::STRING, _) => return Err(self.invalid("expected a text in quotes")),
            (_, line) => line,
        };
        let Some(text) =
            std::str::from_utf8(text).ok().filter(|text| text.is_ascii() && !text.contains('\\'))
        else {
            return self.push(Ref::PLAIN);
        };
        let pushed = self.arena.push_text(text);
        let slice = pushed.map_err(|Full| self.full())?;
        self.push_item(Item::Text(slice))
    }

    /// A number in digits.
    fn digits(&mut self) -> Result<(), Fault> {
        let line = self.stream.line()?;
        let line = line.strip_suffix(b"L").unwrap_or(line);
        let digits = line.strip_prefix(b"-").unwrap_or(line);
        match line {
            b"00" => return self.push(Ref::FALSE),
            b"01" => return self.push(Ref::TRUE),
            _ if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) => {
                return Err(self.invalid("expected a number in digits"));
            }
            _ => {}
        }
        match std::str::from_utf8(line).ok().and_then(|line| line.parse().ok()) {
            Some(value) => self.push_int(value),
            None => self.push(Ref::PLAIN),
        }
    }

    /// A number of any length, lowest byte first, in two's complement.
    fn long(&mut self, opcode: u8) -> Result<(), Fault> {
        let count = self.counted(opcode)?;
        // LONG4 has a signed length.
        if count > u64::from(i32::MAX.unsigned_abs()) {
            return Err(self.invalid("expected the length of a number, found a negative one"));
        }
        if count > 8 {
            self.stream.skip(count)?;
            return self.push(Ref::PLAIN);
        }
        let bytes = self.stream.take(to_usize(count))?;
        let negative = bytes.last().is_some_and(|last| last & 0x80 != 0);
        let mut value = [if negative { 0xff } else { 0 }; 8];
        value[..bytes.len()].copy_from_slice(bytes);
        self.push_int(i64::from_le_bytes(value))
    }

    /// Frames only help to read ahead; they must follow each other inside the pickle.
    fn frame(&mut self) -> Result<(), Fault> {
        let len_bytes = u64::from_le_bytes(self.stream.array()?);
        if self.at < self.frame_end {
            return Err(self.invalid("expected the next frame behind the end of this one"));
        }
        let remaining = self.stream.remaining();
        if len_bytes > remaining {
            let reason = format!("frame of {len_bytes} bytes, of which {remaining} are there");
            return Err(self.invalid(reason));
        }
        self.frame_end = self.stream.offset() + len_bytes;
        Ok(())
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
