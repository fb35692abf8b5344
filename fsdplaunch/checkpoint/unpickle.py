"""Read a pickle without trusting it: a small machine that knows a few opcodes and imports nothing.

The standard unpickler looks names up in real modules and lets a few bytes ask for gigabytes (LONG_BINPUT).
This one only builds containers, numbers, strings and the records a caller declares; every other opcode or
name is refused by name. Memory is bounded by a small multiple of the file's own size.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from fsdplaunch.errors import CheckpointError

MAX_INTEGER_BYTES = 16
MAX_OPEN_MARKS = 100
# One-byte opcodes that leave an object of some 60 bytes behind. Real files have one in about ten bytes.
_AMPLIFIERS = b"]}\x85\x86\x87"
_AMPLIFIER_SHARE = 4
_AMPLIFIER_SLACK = 4096

Call = Callable[[tuple[Any, ...]], Any]


class RefusedError(ValueError):
    """The bytes hold something that has no place in this kind of file."""


@dataclass(frozen=True, slots=True)
class Maker:
    """A class or function that a pickle may name.

    Attributes:
        name: How messages call it.
        call: What stands for calling it, given checked positional arguments; None when it may not be called.
        new: What makes an empty record for NEWOBJ; None when that is not allowed.
        any_arguments: NEWOBJ may bring arguments, which are dropped.
        fuse: What may read a whole record at once, given the machine and the empty record.
    """

    name: str
    call: Call | None = None
    new: Callable[[], "Record"] | None = None
    any_arguments: bool = False
    fuse: "Fuse | None" = None


class Record:
    """An object of ours that a pickle may fill in."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        """Take over the pickled state, checked field by field."""
        msg = f"{type(self).__name__} takes no state, got {type(state).__name__}"
        raise RefusedError(msg)


Fuse = Callable[["Machine", Any], bool]
Names = Mapping[tuple[str, str], Any]
Unknown = Callable[[str, str], Any]
_MARK_FREE = object()


def refuse_name(module: str, name: str) -> NoReturn:
    """Refuse a name that is not on the list."""
    msg = f"it names {short(module + '.' + name)}, which such a file has no use for"
    raise RefusedError(msg)


def short(text: str, limit: int = 80) -> str:
    """Return `text` as a quoted, escaped and bounded piece of an error message."""
    shown = ascii(text if len(text) <= limit else text[:limit] + "...")
    return shown if len(shown) <= 2 * limit else shown[: 2 * limit] + "..."


class Machine:
    """The stack, the marks and the memo while one pickle is read."""

    __slots__ = (
        "data",
        "fetched",
        "marks",
        "memo",
        "names",
        "persistent",
        "position",
        "sizes",
        "stack",
        "unknown",
    )

    def __init__(self, data: bytes, names: Names, persistent: Call | None, unknown: Unknown) -> None:
        self.data = data
        self.position = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []
        # What fused records look up again and again, by the bytes that ask for it.
        self.fetched: dict[bytes, Any] = {}
        self.sizes: dict[tuple[bytes, bytes, bytes], tuple[int, ...]] = {}
        self.names = names
        self.persistent = persistent
        self.unknown = unknown

    def run(self) -> Any:
        """Execute until STOP and return the one object left."""
        data, table = self.data, _TABLE
        while True:
            opcode = data[self.position]
            self.position += 1
            if opcode == _STOP:
                break
            handler = table[opcode]
            if handler is None:
                msg = f"opcode 0x{opcode:02x} at byte {self.position - 1} is not one that torch writes"
                raise RefusedError(msg)
            handler(self)
        if len(self.stack) != 1 or self.marks:
            msg = "the pickle does not end with exactly one object"
            raise RefusedError(msg)
        return self.stack[0]

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        start, end = self.position, self.position + count
        if count < 0 or end > len(self.data):
            msg = f"the pickle ends inside the value at byte {start}"
            raise RefusedError(msg)
        self.position = end
        return self.data[start:end]

    def pop(self) -> Any:
        """Take the top of the stack, not beyond a mark."""
        if self.marks and len(self.stack) <= self.marks[-1]:
            msg = f"the stack runs empty at byte {self.position}"
            raise RefusedError(msg)
        return self.stack.pop()

    def top(self) -> Any:
        """Return the top of the stack, not beyond a mark."""
        if not self.stack or (self.marks and len(self.stack) <= self.marks[-1]):
            msg = f"the stack runs empty at byte {self.position}"
            raise RefusedError(msg)
        return self.stack[-1]

    def pop_mark(self) -> list[Any]:
        """Take everything above the last mark."""
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def find(self, module: str, name: str) -> None:
        """Push what stands for a name."""
        found = self.names.get((module, name), _MARK_FREE)
        self.stack.append(self.unknown(module, name) if found is _MARK_FREE else found)

    def store(self, pairs: list[Any]) -> None:
        """Set keys and values on the dictionary on top."""
        target = self.top()
        if type(target) is not dict or len(pairs) % 2:
            msg = f"entries are set on a {type(target).__name__} at byte {self.position}"
            raise RefusedError(msg)
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            # Hashing a hostile nest of tuples takes for ever; these hash in constant time.
            if not isinstance(key, str | int | float | Record):
                msg = f"a {type(key).__name__} is used as a key at byte {self.position}"
                raise RefusedError(msg)
            target[key] = value

    def extend(self, items: list[Any]) -> None:
        """Append to the list on top."""
        target = self.top()
        if type(target) is not list:
            msg = f"items are appended to a {type(target).__name__} at byte {self.position}"
            raise RefusedError(msg)
        target.extend(items)

    def remember(self, slot: int) -> None:
        """Keep the top in the next memo slot."""
        value = self.top()
        if slot != len(self.memo):
            msg = f"byte {self.position} stores into slot {slot}, the next one is {len(self.memo)}"
            raise RefusedError(msg)
        self.memo.append(value)

    def recall(self, slot: int) -> None:
        """Push a memo slot; a record's class may bring the whole record."""
        if slot >= len(self.memo):
            msg = f"byte {self.position} recalls slot {slot}, which was never stored"
            raise RefusedError(msg)
        value = self.memo[slot]
        if type(value) is Maker and value.fuse is not None and value.new is not None:
            record = value.new()
            if value.fuse(self, record):
                value = record
        self.stack.append(value)

    def fetch(self, reference: bytes) -> Any:
        """Return the memo entry that a BINGET or LONG_BINGET with its argument recalls."""
        try:
            return self.fetched[reference]
        except KeyError:
            slot = int.from_bytes(reference[1:], "little")
            if slot >= len(self.memo):
                msg = f"byte {self.position} recalls slot {slot}, which was never stored"
                raise RefusedError(msg) from None
            return self.fetched.setdefault(reference, self.memo[slot])

    def line(self) -> str:
        """Return the text up to the next line end."""
        end = self.data.find(b"\n", self.position, self.position + 1024)
        if end < 0:
            msg = f"the name at byte {self.position} has no end"
            raise RefusedError(msg)
        text = self.data[self.position : end].decode()
        self.position = end + 1
        return text


Handler = Callable[[Machine], None]
_STOP = ord(".")
_TABLE: list[Handler | None] = [None] * 256


def _handles(*opcodes: int) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        for opcode in opcodes:
            _TABLE[opcode] = handler
        return handler

    return register


def _constant(opcode: int, make: Callable[[], Any]) -> None:
    def push(m: Machine) -> None:
        m.stack.append(make())

    _TABLE[opcode] = push


def _number(opcode: int, layout: str) -> None:
    reader = struct.Struct(layout)

    def push(m: Machine) -> None:
        m.stack.append(reader.unpack(m.take(reader.size))[0])

    _TABLE[opcode] = push


def _text(opcode: int, layout: str, *, decode: bool) -> None:
    reader = struct.Struct(layout)

    def push(m: Machine) -> None:
        raw = m.take(reader.unpack(m.take(reader.size))[0])
        m.stack.append(raw.decode() if decode else raw)

    _TABLE[opcode] = push


_constant(ord("N"), lambda: None)
_constant(0x88, lambda: True)
_constant(0x89, lambda: False)
_constant(ord("]"), list)
_constant(ord("}"), dict)
_constant(ord(")"), tuple)
_number(ord("K"), "<B")
_number(ord("M"), "<H")
_number(ord("J"), "<i")
_number(ord("G"), ">d")
_text(0x8C, "<B", decode=True)
_text(ord("X"), "<I", decode=True)
_text(0x8D, "<Q", decode=True)
_text(ord("C"), "<B", decode=False)
_text(ord("B"), "<I", decode=False)


@_handles(0x80)
def _protocol(m: Machine) -> None:
    version = m.take(1)[0]
    if not 2 <= version <= 5:  # noqa: PLR2004  (pickle protocols)
        msg = f"pickle protocol {version} is not supported"
        raise RefusedError(msg)


@_handles(0x95)
def _frame(m: Machine) -> None:
    m.take(8)


@_handles(ord("("))
def _mark(m: Machine) -> None:
    if len(m.marks) >= MAX_OPEN_MARKS:
        msg = f"containers nest more than {MAX_OPEN_MARKS} deep at byte {m.position}"
        raise RefusedError(msg)
    m.marks.append(len(m.stack))


@_handles(0x8A)
def _long(m: Machine) -> None:
    count = m.take(1)[0]
    if count > MAX_INTEGER_BYTES:
        msg = f"an integer of {count} bytes at byte {m.position}"
        raise RefusedError(msg)
    m.stack.append(int.from_bytes(m.take(count), "little", signed=True))


@_handles(ord("t"))
def _tuple(m: Machine) -> None:
    items = m.pop_mark()
    m.stack.append(tuple(items))


@_handles(0x85, 0x86, 0x87)
def _short_tuple(m: Machine) -> None:
    count = m.data[m.position - 1] - 0x84
    items = [m.pop() for _ in range(count)]
    m.stack.append(tuple(items[::-1]))


@_handles(ord("a"))
def _append(m: Machine) -> None:
    value = m.pop()
    m.extend([value])


@_handles(ord("e"))
def _appends(m: Machine) -> None:
    m.extend(m.pop_mark())


@_handles(ord("s"))
def _setitem(m: Machine) -> None:
    value = m.pop()
    m.store([m.pop(), value])


@_handles(ord("u"))
def _setitems(m: Machine) -> None:
    m.store(m.pop_mark())


@_handles(0x94)
def _memoize(m: Machine) -> None:
    m.memo.append(m.top())


@_handles(ord("q"))
def _binput(m: Machine) -> None:
    m.remember(m.take(1)[0])


@_handles(ord("r"))
def _long_binput(m: Machine) -> None:
    m.remember(int.from_bytes(m.take(4), "little"))


@_handles(ord("h"))
def _binget(m: Machine) -> None:
    m.recall(m.take(1)[0])


@_handles(ord("j"))
def _long_binget(m: Machine) -> None:
    m.recall(int.from_bytes(m.take(4), "little"))


@_handles(ord("c"))
def _global(m: Machine) -> None:
    module = m.line()
    m.find(module, m.line())


@_handles(0x93)
def _stack_global(m: Machine) -> None:
    name, module = m.pop(), m.pop()
    if type(name) is not str or type(module) is not str:
        msg = f"a name at byte {m.position} is not text"
        raise RefusedError(msg)
    m.find(module, name)


@_handles(ord("R"))
def _reduce(m: Machine) -> None:
    arguments, callee = m.pop(), m.pop()
    if not isinstance(callee, Maker) or callee.call is None or type(arguments) is not tuple:
        shown = callee.name if isinstance(callee, Maker) else type(callee).__name__
        msg = f"it calls {shown} at byte {m.position}"
        raise RefusedError(msg)
    m.stack.append(callee.call(arguments))


@_handles(0x81)
def _newobj(m: Machine) -> None:
    arguments, cls = m.pop(), m.pop()
    if not isinstance(cls, Maker) or cls.new is None or (arguments != () and not cls.any_arguments):
        shown = cls.name if isinstance(cls, Maker) else type(cls).__name__
        msg = f"it makes a {shown} at byte {m.position}"
        raise RefusedError(msg)
    m.stack.append(cls.new())


@_handles(ord("b"))
def _build(m: Machine) -> None:
    state, target = m.pop(), m.top()
    if not isinstance(target, Record):
        msg = f"it fills in a {type(target).__name__} at byte {m.position}"
        raise RefusedError(msg)
    target.__setstate__(state)


@_handles(ord("Q"))
def _binpersid(m: Machine) -> None:
    key = m.pop()
    if m.persistent is None or type(key) is not tuple:
        msg = f"a persistent id at byte {m.position}"
        raise RefusedError(msg)
    m.stack.append(m.persistent(key))


def unpickle(
    data: bytes, names: Names, *, persistent: Call | None = None, unknown: Unknown = refuse_name, where: str
) -> Any:
    """Return the object that `data` describes, built only from what `names` allows.

    Args:
        data: The pickle, protocol 2 to 5.
        names: What stands for each `(module, name)`: a `Maker`, or a constant.
        persistent: What makes an object of a persistent id (a tuple), if such ids may occur.
        unknown: What stands for a name that is not in `names`; the default refuses it.
        where: Which file this is, for messages.

    Raises:
        CheckpointError: On anything that is not allowed, and on damage.
    """
    try:
        dense = len(data) - len(data.translate(None, _AMPLIFIERS))
        if dense > len(data) // _AMPLIFIER_SHARE + _AMPLIFIER_SLACK:
            msg = "it is nothing but nested containers"
            raise RefusedError(msg)
        return Machine(data, names, persistent, unknown).run()
    except RefusedError as problem:
        msg = f"{where} is not a checkpoint that is safe to read: {problem}"
    except UnicodeDecodeError:
        msg = f"{where} is damaged: a text in it is not valid UTF-8"
    except (IndexError, struct.error):
        msg = f"{where} is damaged: its pickle ends early or its stack runs empty"
    raise CheckpointError(msg, hint="copy the checkpoint again from where it was written; nothing in it was run")
