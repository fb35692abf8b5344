"""Read a pickle without trusting it: a small interpreter that knows a few opcodes and imports nothing.

It only builds containers, numbers, texts and the records a caller declares; every other opcode or name is refused
by name. Memory is bounded by a small multiple of the file's own size. A subclass of `pickle.Unpickler` can refuse
names, but not count what containers take, nor see a key before it is hashed: a nest of tuples hashes for ever.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from sys import getsizeof
from typing import Any, NoReturn

from fsdplaunch.checkpoint.chunks import ItemKey
from fsdplaunch.checkpoint.untrusted_files import InvalidFileError, refuse, short
from fsdplaunch.errors import CheckpointError

Call = Callable[[tuple[Any, ...]], Any]
# Bytes that objects of a file may take: what real files take is at most three quarters of it.
BYTES_PER_BYTE = 17
BYTES_TO_BEGIN_WITH = 32 * 2**20
# What CPython takes: a place on a list, an empty container with its place, an entry of a dictionary, an object.
SLOT, CONTAINER, ENTRY, OBJECT = 9, 72, 64, 128
# Larger ones could be chosen so that they all hash alike. Keys of a tuple, too, hash in constant time.
_MAX_INTEGER_KEY = 2**60


@dataclass(frozen=True, slots=True)
class PickledCallable:
    """A class or function that a pickle may name.

    Attributes:
        name: How messages call it.
        call: What stands for calling it, given checked positional arguments; None when it may not be called.
        new: NEWOBJ makes an object of it.
        any_arguments: NEWOBJ may bring arguments, which are dropped.
        fuse: What may read several records at once from where its name was recalled.
    """

    name: str
    call: Call | None = None
    new: bool = False
    any_arguments: bool = False
    fuse: "Fuse | None" = None


class PickledObject:
    """An object as the fields it was saved with: a dictionary, or a pair of one and the slots. Inert."""

    __slots__ = ("name", "states")

    def __init__(self, name: str) -> None:
        self.name = name
        self.states: tuple[Any, ...] = ()

    def take(self, state: Any) -> None:
        """Keep the pickled state as it is: several objects may name one state."""
        self.states = state[:_MAX_STATES] if type(state) is tuple else (state,)

    def get(self, key: str) -> Any:
        """Return a field, None when there is none."""
        return next((part[key] for part in reversed(self.states) if type(part) is dict and key in part), None)


class PickledDict(dict[Any, Any]):
    """A dictionary with attributes, such as a state dict with its versions; the attributes are dropped."""

    __slots__ = ()


Fuse = Callable[["Interpreter", int], int]
Handler = Callable[["Interpreter"], object]
Names = Mapping[tuple[str, str], Any]
Unknown = Callable[[str, str], Any]
_KEYS = (str, int, float, bytes, type(None))
_MAX_KEY_PARTS = 16
_NOT_LISTED = object()
# Fields come as a dictionary, or as a pair of one and the slots.
_MAX_STATES = 2


class Interpreter:
    """The stack, the marks and the memo while one pickle is read."""

    def __init__(self, data: bytes, names: Names, persistent: Call | None, unknown: Unknown) -> None:
        self.data = data
        self.position = 0
        self.spent = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []
        # What fused records look up again and again, by the bytes that ask for it.
        self.fetched: dict[bytes, Any] = {}
        self.known: Any = None
        self.names = names
        self.persistent = persistent
        self.unknown = unknown

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        start, end = self.position, self.position + count
        if count < 0 or end > len(self.data):
            refuse(f"the pickle ends inside the value at byte {start}")
        self.position = end
        return self.data[start:end]

    def top(self) -> Any:
        """Return the top of the stack, not beyond a mark."""
        if not self.stack or (self.marks and len(self.stack) <= self.marks[-1]):
            refuse(f"the stack is empty at byte {self.position}")
        return self.stack[-1]

    def pop(self) -> Any:
        """Take the top of the stack, not beyond a mark."""
        self.top()
        return self.stack.pop()

    def pop_many(self, count: int) -> list[Any]:
        """Take so many from the top of the stack, in the order in which they came."""
        return [self.pop() for _ in range(count)][::-1]

    def pop_mark(self) -> list[Any]:
        """Take everything above the last mark."""
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def spend(self, nbytes: int) -> None:
        """Count memory that objects take, beside the stack and the memo, and refuse what is out of proportion."""
        self.spent += nbytes
        if self.spent > BYTES_TO_BEGIN_WITH:
            slots = SLOT * (len(self.stack) + len(self.memo))
            if self.spent + slots > BYTES_TO_BEGIN_WITH + BYTES_PER_BYTE * len(self.data):
                refuse(f"at byte {self.position} it needs more than {BYTES_PER_BYTE} times its size in memory")

    def find(self, module: str, name: str) -> None:
        """Push what stands for a name."""
        found = self.names.get((module, name), _NOT_LISTED)
        if found is _NOT_LISTED:
            self.spend(4 * OBJECT + len(module) + len(name))
            found = self.unknown(module, name)
        self.stack.append(found)

    def store(self, pairs: list[Any]) -> None:
        """Set keys and values on the dictionary on top."""
        target = self.top()
        if type(target) not in {dict, PickledDict} or len(pairs) % 2:
            refuse(f"entries are set on a {type(target).__name__} at byte {self.position}")
        self.spend(ENTRY * (len(pairs) // 2))
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            # Hashing a hostile nest of tuples takes for ever, and many integers may hash alike.
            if type(key) is int:
                good = abs(key) <= _MAX_INTEGER_KEY
            elif type(key) is tuple:
                good = len(key) <= _MAX_KEY_PARTS and all(isinstance(part, _KEYS) for part in key)
            else:
                good = isinstance(key, (*_KEYS, ItemKey, PickledObject))
            if not good:
                refuse(f"a {type(key).__name__} is used as a key at byte {self.position}")
            target[key] = value

    def extend(self, items: list[Any]) -> None:
        """Append to the list on top."""
        target = self.top()
        if type(target) is not list:
            refuse(f"items are appended to a {type(target).__name__} at byte {self.position}")
        self.spend(SLOT * len(items))
        target.extend(items)

    def remember(self, slot: int) -> None:
        """Keep the top in the next memo slot."""
        value = self.top()
        if slot != len(self.memo):
            refuse(f"byte {self.position} stores into slot {slot}, the next one is {len(self.memo)}")
        self.memo.append(value)

    def recall(self, slot: int, width: int) -> None:
        """Push a memo slot that `width` bytes asked for; a record's class may bring several records instead."""
        if slot >= len(self.memo):
            refuse(f"byte {self.position} recalls slot {slot}, which was never stored")
        value = self.memo[slot]
        if type(value) is not PickledCallable or value.fuse is None or not value.fuse(self, width):
            self.stack.append(value)

    def fetch(self, reference: bytes) -> Any:
        """Return the memo entry that a BINGET or LONG_BINGET with its argument recalls."""
        try:
            return self.fetched[reference]
        except KeyError:
            slot = int.from_bytes(reference[1:], "little")
            if slot >= len(self.memo):
                refuse(f"byte {self.position} recalls slot {slot}, which was never stored")
            return self.fetched.setdefault(reference, self.memo[slot])

    def line(self) -> str:
        """Return the text up to the next line end."""
        end = self.data.find(b"\n", self.position, self.position + 1024)
        if end < 0:
            refuse(f"the name at byte {self.position} has no end")
        text = self.data[self.position : end].decode()
        self.position = end + 1
        return text


MAX_INTEGER_BYTES = 17  # the state of numpy's generators: 128 bits and a sign
MAX_OPEN_MARKS = 100


def _check_protocol(m: Interpreter) -> None:
    version = m.take(1)[0]
    if not 2 <= version <= 5:  # noqa: PLR2004  (pickle protocols)
        refuse(f"pickle protocol {version} is not supported")


def _mark(m: Interpreter) -> None:
    if len(m.marks) >= MAX_OPEN_MARKS:
        refuse(f"containers nest more than {MAX_OPEN_MARKS} deep at byte {m.position}")
    m.marks.append(len(m.stack))


def _long(m: Interpreter) -> None:
    count = m.take(1)[0]
    if count > MAX_INTEGER_BYTES:
        refuse(f"an integer of {count} bytes at byte {m.position}")
    m.stack.append(int.from_bytes(m.take(count), "little", signed=True))


def _tuple(m: Interpreter, items: list[Any]) -> None:
    m.spend(CONTAINER + SLOT * len(items))
    m.stack.append(tuple(items))


def _stack_global(m: Interpreter) -> None:
    name, module = m.pop(), m.pop()
    if type(name) is not str or type(module) is not str:
        refuse(f"a name at byte {m.position} is not text")
    m.find(module, name)


def _reduce(m: Interpreter) -> None:
    arguments, callee = m.pop(), m.pop()
    if not isinstance(callee, PickledCallable) or callee.call is None or type(arguments) is not tuple:
        shown = callee.name if isinstance(callee, PickledCallable) else type(callee).__name__
        refuse(f"it calls {shown} at byte {m.position}")
    made = callee.call(arguments)
    m.spend(getattr(made, "weight", OBJECT))
    m.stack.append(made)


def _newobj(m: Interpreter) -> None:
    arguments, cls = m.pop(), m.pop()
    if not isinstance(cls, PickledCallable) or not cls.new or (arguments != () and not cls.any_arguments):
        shown = cls.name if isinstance(cls, PickledCallable) else type(cls).__name__
        refuse(f"it makes a {shown} at byte {m.position}")
    m.spend(OBJECT)
    m.stack.append(PickledObject(cls.name))


def _build(m: Interpreter) -> None:
    state, target = m.pop(), m.top()
    if isinstance(target, PickledObject):
        target.take(state)
    elif not isinstance(target, PickledDict):
        refuse(f"it fills in a {type(target).__name__} at byte {m.position}")


def _persistent(m: Interpreter) -> None:
    key = m.pop()
    if m.persistent is None or type(key) is not tuple:
        refuse(f"a persistent id at byte {m.position}")
    m.stack.append(m.persistent(key))


def _container(make: type) -> Handler:
    def push(m: Interpreter) -> None:
        m.spend(CONTAINER)
        m.stack.append(make())

    return push


def _number(layout: str) -> Handler:
    reader = struct.Struct(layout)
    return lambda m: m.stack.append(*reader.unpack(m.take(reader.size)))


def _text(width: int, *, decode: bool = True) -> Handler:
    def push(m: Interpreter) -> None:
        raw = m.take(int.from_bytes(m.take(width), "little"))
        value = raw.decode() if decode else raw
        m.spend(getsizeof(value) + SLOT)
        m.stack.append(value)

    return push


# The opcodes that torch's writers use; any other is refused. A merge does without the module `pickle`.
_HANDLERS: dict[int, Handler] = {
    0x80: _check_protocol,  # PROTO
    0x95: lambda m: m.take(8),  # FRAME
    ord("N"): lambda m: m.stack.append(None),  # NONE
    0x88: lambda m: m.stack.append(True),  # NEWTRUE
    0x89: lambda m: m.stack.append(False),  # NEWFALSE
    ord("K"): _number("<B"),  # BININT1
    ord("M"): _number("<H"),  # BININT2
    ord("J"): _number("<i"),  # BININT
    ord("G"): _number(">d"),  # BINFLOAT
    0x8A: _long,  # LONG1
    0x8C: _text(1),  # SHORT_BINUNICODE
    ord("X"): _text(4),  # BINUNICODE
    0x8D: _text(8),  # BINUNICODE8
    ord("C"): _text(1, decode=False),  # SHORT_BINBYTES
    ord("B"): _text(4, decode=False),  # BINBYTES
    ord("("): _mark,  # MARK
    ord("]"): _container(list),  # EMPTY_LIST
    ord("}"): _container(dict),  # EMPTY_DICT
    ord(")"): lambda m: m.stack.append(()),  # EMPTY_TUPLE
    ord("t"): lambda m: _tuple(m, m.pop_mark()),  # TUPLE
    0x85: lambda m: _tuple(m, m.pop_many(1)),  # TUPLE1
    0x86: lambda m: _tuple(m, m.pop_many(2)),  # TUPLE2
    0x87: lambda m: _tuple(m, m.pop_many(3)),  # TUPLE3
    ord("a"): lambda m: m.extend(m.pop_many(1)),  # APPEND
    ord("e"): lambda m: m.extend(m.pop_mark()),  # APPENDS
    ord("s"): lambda m: m.store(m.pop_many(2)),  # SETITEM
    ord("u"): lambda m: m.store(m.pop_mark()),  # SETITEMS
    0x94: lambda m: m.memo.append(m.top()),  # MEMOIZE
    ord("q"): lambda m: m.remember(m.take(1)[0]),  # BINPUT
    ord("r"): lambda m: m.remember(int.from_bytes(m.take(4), "little")),  # LONG_BINPUT
    ord("h"): lambda m: m.recall(m.take(1)[0], 2),  # BINGET
    ord("j"): lambda m: m.recall(int.from_bytes(m.take(4), "little"), 5),  # LONG_BINGET
    ord("c"): lambda m: m.find(m.line(), m.line()),  # GLOBAL
    0x93: _stack_global,  # STACK_GLOBAL
    ord("R"): _reduce,  # REDUCE
    0x81: _newobj,  # NEWOBJ
    ord("b"): _build,  # BUILD
    ord("Q"): _persistent,  # BINPERSID
}
_STOP = ord(".")


def _refuse_name(module: str, name: str) -> NoReturn:
    refuse(f"it names {short(module + '.' + name)}, which such a file never needs")


def unpickle(
    data: bytes, names: Names, *, persistent: Call | None = None, unknown: Unknown = _refuse_name, where: str
) -> Any:
    """Return the object that `data` describes, built only from what `names` allows.

    Args:
        data: The pickle, protocol 2 to 5.
        names: What stands for each `(module, name)`: a `PickledCallable`, or a constant.
        persistent: What makes an object of a persistent id (a tuple), if such ids may occur.
        unknown: What stands for a name that is not in `names`; the default refuses it.
        where: Which file this is, for messages.

    Raises:
        CheckpointError: On anything that is not allowed, and on damage.
    """
    m = Interpreter(data, names, persistent, unknown)
    try:
        while (opcode := data[m.position]) != _STOP:
            m.position += 1
            handler = _HANDLERS.get(opcode)
            if handler is None:
                refuse(f"opcode 0x{opcode:02x} at byte {m.position - 1} is not one that torch writes")
            handler(m)
        if len(m.stack) == 1 and not m.marks:
            return m.stack[0]
        msg = f"{where} is not a checkpoint that is safe to read: it does not end with exactly one object"
    except InvalidFileError as problem:
        msg = f"{where} is not a checkpoint that is safe to read: {problem}"
    except UnicodeDecodeError:
        msg = f"{where} is damaged: a text in it is not valid UTF-8"
    except (IndexError, struct.error):
        msg = f"{where} is damaged: its pickle ends early or pops from an empty stack"
    raise CheckpointError(msg, hint="copy the checkpoint again from where it was written; nothing in it was run")
