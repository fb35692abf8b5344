"""YAML text to keys with their places, and values back to YAML text.

PyYAML's node tree is read, not its objects: it has the place of every key, shows keys that are set twice, and
nothing in a file can make it run code. Plain scalars mean what YAML 1.2's core schema says (`no` is a text,
`1e-5` a number). Merge keys (`<<`), which are YAML 1.1's, are refused. What is written is quoted so that readers
of either version understand it alike.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from fsdplaunch.config.problems import Problem, TextPosition
from fsdplaunch.config.schema.config import KeySpec

MAX_DEPTH, MAX_VALUES, MAX_BYTES = 32, 20_000, 256 * 1024
TAG = "tag:yaml.org,2002:"


@dataclass(frozen=True, slots=True)
class YamlEntry:
    """One `key: value` of a mapping."""

    name: str  # the key as written
    place: TextPosition  # where the key stands
    node: Node  # the value, for `YamlText.value` and `YamlText.entries`
    key_node: Node  # the key

    @property
    def is_mapping(self) -> bool:
        """Return whether the value is a mapping."""
        return isinstance(self.node, MappingNode)

    @property
    def is_null(self) -> bool:
        """Return whether the key says nothing: no value, `~` or `null`."""
        return self.node.tag == TAG + "null"


class UnreadableValueError(ValueError):
    """A value no key can have: its words are for the user."""


@dataclass(slots=True)
class YamlText:
    """One YAML text and what is wrong with it."""

    source: str  # the file's name in messages
    root: MappingNode | None = None  # the mapping, or None when the text is empty or cannot be read
    # Faults of the text found so far; `entries` adds keys that are set twice.
    problems: list[Problem] = field(default_factory=list)
    _left: int = MAX_VALUES

    def place(self, mark: Any) -> TextPosition:
        """Return where a mark of PyYAML points."""
        return TextPosition(source=self.source, line=mark.line + 1, col=mark.column + 1)

    def report(self, rule: str, message: str, mark: Any = None, *, key: str = "", hint: str | None = None) -> None:
        """Add a problem."""
        place = TextPosition(source=self.source) if mark is None else self.place(mark)
        self.problems.append(Problem(id=rule, key=key, message=message, hint=hint, place=place))

    def entries(self, node: Node | None, section: str = "") -> list[YamlEntry]:
        """List a mapping's keys, each once; reports those that are set twice."""
        found: dict[str, YamlEntry] = {}
        for key_node, value in node.value if isinstance(node, MappingNode) else ():
            mark = key_node.start_mark
            if not isinstance(key_node, ScalarNode):
                self.report("not-a-key", "a key must be a word", mark, key=section)
                continue
            if key_node.value == "<<" and key_node.style is None:
                self.report(
                    "not-a-key", "merge keys (<<) are not supported", mark, key=section, hint="write the keys out"
                )
                continue
            entry = YamlEntry(key_node.value, self.place(mark), value, key_node)
            first = found.setdefault(entry.name, entry)
            if first is not entry:
                key = f"{section}.{entry.name}" if section else entry.name
                message = f"is set twice (first on line {first.place.line})"
                self.report("duplicate-key", message, mark, key=key, hint="keep one of them")
        return list(found.values())

    def value(self, node: Node, *, verbatim: bool = False, depth: int = 0) -> Any:
        """Return a node's value as plain Python data; with `verbatim`, numbers as they are spelled.

        Raises:
            UnreadableValueError: An unknown tag, a number out of range, or more values than any file needs.
        """
        self._left -= 1
        if self._left < 0 or depth > MAX_DEPTH:
            msg = "holds too many values"
            raise UnreadableValueError(msg)
        if isinstance(node, ScalarNode):
            return _scalar(node, verbatim=verbatim)
        inside = depth + 1
        if isinstance(node, SequenceNode) and node.tag == TAG + "seq":
            return [self.value(item, verbatim=verbatim, depth=inside) for item in node.value]
        if isinstance(node, MappingNode) and node.tag == TAG + "map":
            entries = self.entries(node)
            return {entry.name: self.value(entry.node, verbatim=verbatim, depth=inside) for entry in entries}
        msg = f"has the tag {node.tag.replace(TAG, '!!')}, which no key takes"
        raise UnreadableValueError(msg)


def _scalar(node: ScalarNode, *, verbatim: bool) -> Any:
    tag, text = node.tag.removeprefix(TAG), node.value
    if tag == "str" or (verbatim and tag in ("int", "float")):
        return text
    makers: dict[str, Callable[[str], Any]] = {
        "null": lambda _: None,
        "bool": lambda word: word.lower() == "true",
        "int": lambda word: int(word, {"0o": 8, "0x": 16}.get(word[:2].lower(), 10)),
        "float": lambda word: float(word.lower().replace(".inf", "inf").replace(".nan", "nan")),
    }
    if tag not in makers:
        msg = f"has the tag {node.tag.replace(TAG, '!!')}, which no key takes"
        raise UnreadableValueError(msg)
    try:
        return makers[tag](text)
    except ValueError:
        msg = f"{text[:40]} is not a number that can be read"
        raise UnreadableValueError(msg) from None


_RESOLVERS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
)


def _first_characters() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """Return the table PyYAML asks: a plain scalar's first character -> tags to try."""
    table: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for tag, pattern, firsts in _RESOLVERS:
        for first in firsts:
            table.setdefault(first, []).append((TAG + tag, re.compile(rf"(?:{pattern})\Z")))
    return table


class _TooDeepError(yaml.MarkedYAMLError):
    """The text is nested deeper than any configuration."""


class _Loader(yaml.SafeLoader):
    """Composes nodes with YAML 1.2's plain scalars and a bound on nesting."""

    yaml_implicit_resolvers = _first_characters()
    _depth = 0

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            problem = f"is nested more than {MAX_DEPTH} deep"
            raise _TooDeepError(problem=problem, problem_mark=self.get_mark())
        node: Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node


def read_text(data: str | bytes, source: str) -> YamlText:
    """Read one YAML (or JSON) document, UTF-8 with or without a byte order mark; messages call it `source`.

    Never raises for what is wrong with the text: it is in `problems`.
    """
    text = YamlText(source)
    if len(data) > MAX_BYTES:
        text.report("too-large", f"is larger than {MAX_BYTES // 1024} KiB", hint="is this the right file?")
        return text
    try:
        decoded = data.decode("utf-8-sig") if isinstance(data, bytes) else data.removeprefix("\ufeff")
        root = _Loader(decoded).get_single_node()
    except UnicodeDecodeError as error:
        text.report("not-utf-8", f"byte {error.start} is not UTF-8", hint="save the file as UTF-8")
    except _TooDeepError as error:
        text.report("too-deep", str(error.problem), error.problem_mark)
    except yaml.MarkedYAMLError as error:
        message, hint = _syntax(error, decoded)
        text.report("syntax", message, error.problem_mark or error.context_mark, hint=hint)
    except yaml.reader.ReaderError as error:
        before = decoded[: error.position]
        mark = yaml.Mark("", 0, before.count("\n"), len(before) - before.rfind("\n") - 1, None, 0)
        text.report("syntax", f"the character U+{int(error.character):04X} is not allowed in YAML", mark)
    else:
        if isinstance(root, MappingNode):
            text.root = root
        elif root is not None and root.tag != TAG + "null":
            kind = "a list" if isinstance(root, SequenceNode) else "a single value"
            text.report("not-a-mapping", f"holds {kind}, not keys", root.start_mark, hint="write key: value lines")
    return text


def _syntax(error: yaml.MarkedYAMLError, decoded: str) -> tuple[str, str | None]:
    """Put PyYAML's errors in our words, for the mistakes people make."""
    mark, problem = error.problem_mark, str(error.problem or error.context)
    lines = decoded.splitlines()
    line = lines[mark.line] if mark is not None and mark.line < len(lines) else ""
    if "\\t" in problem or line[: len(line) - len(line.lstrip())].count("\t"):
        return "a tab indents this line", "indent with spaces"
    if "expected a single document" in str(error.context):
        return "a second document begins here", "keep one document per file"
    if "undefined alias" in problem:
        return problem.replace("found ", ""), "define it with & above, or quote a text that begins with *"
    return f"is not YAML: {problem}", "check the colons, quotes and indentation just above"


def read_scalar(text: str, *, verbatim: bool = False) -> Any:
    """Return the value that `text` has as the right side of `key:`, for command lines.

    With `verbatim` it is taken as it is, unless it begins with a quote or a bracket.

    Raises:
        UnreadableValueError: It is not YAML.
    """
    bare = text.strip()
    if verbatim and bare not in ("", "~", "null") and bare[0] not in "'\"[{":
        return bare
    read = read_text(f"value: {text}" if text.strip() else "value:", "command line")
    entries = read.entries(read.root)
    if read.problems or len(entries) != 1:
        msg = "is not a value in YAML"
        raise UnreadableValueError(msg)
    return read.value(entries[0].node, verbatim=verbatim)


class _Dumper(yaml.SafeDumper):
    """Quotes what either version of YAML would read as something other than text: `no`, `1e-5`, `012`."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002  (PyYAML's signature)
        return True


def _text_node(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = None if text.isprintable() else '"'  # what is escaped stays one line
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_old, _new = yaml.SafeDumper.yaml_implicit_resolvers, _first_characters()
_Dumper.yaml_implicit_resolvers = {first: [*_old.get(first, []), *_new.get(first, [])] for first in {*_old, *_new}}
_Dumper.add_representer(str, _text_node)


def plain_value(spec: KeySpec, value: Any) -> Any:
    """Return a canonical value as a file should hold it: names with commas, lists as lists."""
    if isinstance(value, tuple):
        text = spec.key.kind.write(value)
        return list(value) if text.startswith("[") or not value or spec.name == "preload" else text
    return value


def _dump(value: Any, *, flow: bool) -> str:
    shape: Any = {"default_flow_style": flow, "width": float("inf"), "sort_keys": False}
    return str(yaml.dump(value, Dumper=_Dumper, allow_unicode=True, **shape))


def flow_text(value: Any) -> str:
    """Return a value in one line, as it stands to the right of `key: ` or inside brackets."""
    return _dump(value, flow=True).removesuffix("\n").removesuffix("\n...")


def block_lines(name: str, value: Any, indent: int) -> list[str]:
    """Return the lines of `name: value`, mappings over several lines."""
    if isinstance(value, dict) and value:
        return [" " * indent + line for line in _dump({name: value}, flow=False).splitlines()]
    return [f"{' ' * indent}{name}: {flow_text(value)}"]
