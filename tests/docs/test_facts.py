"""What the documents name is there: files and folders, public functions, error messages."""

import ast
import re
from functools import cache

import pytest

import fsdplaunch
from tests.docs.pages import ROOT, anchors, blocks, every, spans

_PATH = re.compile(r"(?<![\w/.-])(?:fsdplaunch|scripts|tests|configs|docs|\.github)/[\w./-]*\w")
_PUBLIC = re.compile(r"\bfsdplaunch\.([A-Za-z_]\w*)\b(?!\.)")
_FIELD = "\0"
"""Stands for what a message fills in."""
_OF_TORCH = "Messages of torch"
FORMER_WORDS = "number format|element type|whole tensor|old wrapper|machine 0|version 1|version 2"
"""Words that have a better one now: dtype, full tensor, FSDP1 and FSDP2, node 0 or coordinator."""


def paths() -> list[str]:
    """Files and folders named in code; what holds a placeholder is left out."""
    code = [span for span in every(spans) if "<" not in span.text]
    code += [block for block in every(blocks) if block.language == "mermaid"]
    return sorted({match for one in code for match in _PATH.findall(one.text)})


@pytest.mark.parametrize("path", paths())
def test_path_exists(path):
    assert (ROOT / path).exists()


def test_pages_named_in_messages_exist():
    named = [found for text in sources() for found in re.findall(r"(docs/[\w-]+\.md)(?:, ([\w ,]+))?", text)]
    assert len(named) >= 2
    wrong = []
    for page, heading in named:
        known = anchors(ROOT / page) if (ROOT / page).is_file() else set()
        if not known or (heading and heading.strip().replace(" ", "-") not in known):
            wrong.append((page, heading))
    assert wrong == []


def test_public_names_exist():
    code = [*every(spans), *every(blocks)]
    named = {name for one in code for name in _PUBLIC.findall(one.text)} - {"git", "json"}
    modules = {path.stem for path in (ROOT / "fsdplaunch").iterdir()}
    assert {name for name in named if name not in fsdplaunch.__all__ and name not in modules} == set()


@cache
def sources() -> list[str]:
    """Every text in the package, with a mark for each field, and the expected output of the cases."""
    texts = []
    for file in sorted((ROOT / "fsdplaunch").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else _FIELD for part in node.values]
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts + [file.read_text() for file in sorted((ROOT / "tests/cases").glob("*.expected.txt"))]


def own_messages() -> list[str]:
    """Messages of ours that troubleshooting explains: the first column of its tables, but for torch's section."""
    text = (ROOT / "docs/troubleshooting.md").read_text()
    found = []
    for section in text.split("\n## ")[1:]:
        if section.startswith(_OF_TORCH):
            continue
        rows = [line for line in section.splitlines() if line.startswith("| ") and "`" in line.split(" | ")[0]]
        found += [message for row in rows for message in re.findall(r"`([^`]+)`", row.split(" | ")[0])]
    return found


@pytest.mark.parametrize("message", own_messages())
def test_message_is_one_of_ours(message):
    literal = re.split(r"<[^>]*>", message)
    pattern = re.compile(".*?".join(map(re.escape, literal)), re.DOTALL)
    assert len("".join(literal)) >= 8, "too little to be found"
    assert any(pattern.search(text) for text in sources())


def test_words():
    wrong = []
    for page in sorted({one.page for one in every(spans)}):
        prose = re.sub(r"```.*?```|^ {4}.*$|`[^`]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        wrong += [f"{page.name}: {word}" for word in re.findall(FORMER_WORDS, prose.lower())]
    assert wrong == []


_OURS = re.compile(
    r"^\s*(?:[\d.]+ s\s+)?(?:error|note|fsdplaunch): +(.+)|^\s+hint: +(.+)|^.+:\d+:\d+: [\w.]+: (.+) \[[\w-]+\]$",
    re.MULTILINE,
)
_BY_SSH = re.compile(r"\w+: (ssh: |Connection )")


def shown_messages() -> list[str]:
    """Messages in the output that pages show."""
    texts = [one.text for one in every(blocks) if one.language == ""]
    shown = {next(filter(None, match.groups())) for text in texts for match in _OURS.finditer(text)}
    return sorted(message for message in shown if not _BY_SSH.match(message))


_FILLED_IN = {"host", "run", "ckpt", "root", "Linear", "Transformer", "Block", "GPT", "FSDP", "maybe", "use"}
"""Words of the examples themselves: names of hosts, folders, classes; the system's own of a port in use."""


@cache
def literals() -> set[str]:
    """What stands between the fields of the package's texts."""
    return {part for text in sources() for part in text.split(_FIELD) if len(part) >= 5}


@pytest.mark.parametrize("message", shown_messages())
def test_message_in_shown_output_is_one_of_ours(message):
    """Every word of it is part of some text in the package; an outdated example has words that are not."""
    known = {place for part in literals() if part in message for place in _places(message, part)}
    words = re.finditer(r"[A-Za-z]{3,}", message)
    unknown = {word[0] for word in words if not known.issuperset(range(word.start(), word.end()))}
    assert unknown <= _FILLED_IN


def _places(message: str, part: str) -> set[int]:
    starts = [found.start() for found in re.finditer(f"(?={re.escape(part)})", message)]
    return {place for start in starts for place in range(start, start + len(part))}
