"""YAML that nobody means well: a configuration, or one message for each thing that is wrong with it.

Anchors that multiply, merges in circles, tags, keys twice or of other kinds, other encodings and line ends, texts
that steer a terminal, and a good file with bytes changed. A good file among them stays good.
"""

import random
from collections.abc import Callable, Iterator

from scripts.campaigns.attack_classes.case import Case
from scripts.campaigns.attack_classes.inputs import give

COUNT = 150
_GOOD = """\
distributed_type: FSDP
mixed_precision: bf16
num_processes: 2
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: Block
launch:
  env: {OMP_NUM_THREADS: "1"}
"""
_VALUES = (
    *("!!python/object/apply:os.system ['touch x']", "!!binary aGk=", "!!timestamp 2001-01-01", "!!set {a, b}"),
    *(
        "!!float x",
        "!!int 0o9",
        "!!null x",
        "!own x",
        "!<tag:yaml.org,2002:map> [a]",
        "*gone",
        "&a [*a]",
        "&a {a: *a}",
    ),
    *(
        '"\\0"',
        '"\\ud800"',
        '"\\e[2J"',
        '"\\u202e"',
        "'a\n\n  b'",
        "|+9\n  x",
        "? a : b",
        "- - - a",
        "{a: {a: {a: }}}",
    ),
    *(
        "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[",
        "{" * 5000,
        "'" + "x" * 300_000 + "'",
        "9" * 6000,
        "1e999",
        "0x" + "f" * 4000,
    ),
)
_ADDED = (
    "num_processes: 4\nnum_processes: 2\n",
    "fsdp_config:\n  fsdp_version: 1\n",
    "<<: {num_processes: 3}\n",
    "<<: [*x, *x]\n",
    "a: &x {<<: *x}\n<<: *x\n",
    "? [a, b]\n: c\n",
    "? {a: b}\n: c\n",
    "1: 2\ntrue: 3\nnull: 4\n~: 5\n",
    "---\nnum_processes: 9\n",
    "...\nrest\n",
    "%YAML 9.9\n---\na: b\n",
    "%TAG ! tag:evil,2000:\n",
    '"\\x1b]0;title\\a": 1\n',
    "\u202enum_machines: 1\n",
    "num_processes : 2\n\tnum_machines: 1\n",
    "x" * 70_000 + ": 1\n",
    "".join(f"key{number}: 1\n" for number in range(3000)),
)
_COMMANDS = (
    *(["config", "validate", "f.yaml"], ["config", "show", "-c", "f.yaml", "--origin"]),
    *(["launch", "-c", "f.yaml", "--dry-run", "train.py"], ["config", "convert", "--to", "fsdp2", "f.yaml"]),
)
_ENCODINGS = ("utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1", "utf-7", "cp037")


def _bomb(chance: random.Random) -> bytes:
    """Return anchors of which each holds the one before several times."""
    lines, wide = ["a0: &a0 [x]"], chance.choice([2, 9, 40])
    for level in range(1, chance.choice([5, 9, 30])):
        inner = ", ".join([f"*a{level - 1}"] * wide)
        lines.append(f"a{level}: &a{level} " + (f"[{inner}]" if chance.random() < 0.5 else f"{{<<: [{inner}]}}"))
    return ("\n".join(lines) + "\n" + _GOOD).encode()


def _value(chance: random.Random) -> bytes:
    lines = _GOOD.splitlines()
    place = chance.choice([number for number, line in enumerate(lines) if not line.endswith(":")])
    lines[place] = lines[place].partition(":")[0] + ": " + chance.choice(_VALUES)
    return "\n".join(lines).encode()


def _encoded(chance: random.Random) -> bytes:
    text = _GOOD.replace("Block", chance.choice(["Block", "Bl\u00f6ck", "Block\u2028", "Block\x85"]))
    return text.encode(chance.choice(_ENCODINGS), errors="replace")


def _changed(chance: random.Random) -> bytes:
    data = bytearray(_GOOD.encode())
    for _ in range(chance.choice([1, 1, 3, 20])):
        data[chance.randrange(len(data))] = chance.choice([0, 9, 13, 27, 39, 58, 91, 123, 0x85, 0xFF, 38, 42, 33])
    return bytes(data)


def _line_ends(chance: random.Random) -> bytes:
    return _GOOD.replace("\n", chance.choice(["\r\n", "\r", "\x85", "\u2028", "\n\x00\n", "\n\n"])).encode()


TEXTS: tuple[Callable[[random.Random], bytes], ...] = (
    *(_bomb, _value, _value, _encoded, _changed, _changed, _line_ends),
    lambda chance: (_GOOD + chance.choice(_ADDED)).encode(),
    lambda chance: (chance.choice(_ADDED) + _GOOD).encode(),
)


def cases(chance: random.Random, count: int | None) -> Iterator[Case]:
    """Make the cases: a text of every kind, given to a command that reads it."""
    for number in range(count or COUNT):
        text, words = chance.choice(TEXTS)(chance), list(chance.choice(_COMMANDS))
        yield Case(name=f"{number}: {text[:40]!r} in {words}", attack=lambda t=text, w=words: _read(w, t))


def _read(words: list[str], text: bytes) -> None:
    give(words, {"f.yaml": text})
    if text.replace(b"\r\n", b"\n").removeprefix(b"\xef\xbb\xbf") == _GOOD.encode():
        assert "no problems" in give(["config", "validate", "f.yaml"], {"f.yaml": text})
