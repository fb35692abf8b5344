"""The documents as the tests read them: pages, their code, their links and headings."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / ".github/SECURITY.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_INDENTED = re.compile(r"(?:^ {4,}\S.*\n|^ {4,}\n)+", re.MULTILINE)
_SPAN = re.compile(r"`([^`\n]+(?:\n[^`\n]+)?)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")


@dataclass(frozen=True, slots=True)
class Code:
    """Some code in a page: a block, or words between backticks."""

    page: Path
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {self.text[:60]}"


def blocks(page: Path) -> Iterator[Code]:
    """Fenced and indented blocks."""
    text = page.read_text()
    for language, body in _FENCE.findall(text):
        yield Code(page, language, body)
    for body in _INDENTED.findall(_FENCE.sub("", text)):
        yield Code(page, "", re.sub(r"^ {4}", "", body, flags=re.MULTILINE))


def spans(page: Path) -> Iterator[Code]:
    """Words between backticks, outside of blocks."""
    prose = _INDENTED.sub("\n", _FENCE.sub("", page.read_text()))
    for body in _SPAN.findall(prose):
        yield Code(page, "", " ".join(body.split()).replace("\\|", "|"))


def links(page: Path) -> list[str]:
    """Where the page's links lead."""
    return _LINK.findall(_INDENTED.sub("\n", _FENCE.sub("", page.read_text())))


def anchors(page: Path) -> set[str]:
    """The page's headings as GitHub makes links of them."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def every(kind) -> list[Code]:
    """All code of one kind in all pages."""
    return [code for page in PAGES for code in kind(page)]
