"""Show pages that stand outside of docs/ on the site as well, and turn links between them into links of the site.

A hook of mkdocs (`mkdocs.yml`). README, CONTRIBUTING and the like stay where a repository has them, and are in one
place only; on GitHub the links in the files work as they are written.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    ".github/SECURITY.md": "security.md",
    "configs/REFERENCE.md": "reference.md",
}
"""Files of the repository, and the pages of the site that they become."""

_LINK = re.compile(r"(\]\()([^)\s#]+\.md)((?:#[^)\s]*)?\))")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=with_site_links(text, source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page that stands in docs/."""
    return markdown if page.file.generated_by else with_site_links(markdown, f"docs/{page.file.src_uri}")


def with_site_links(text: str, source: str) -> str:
    """Return a page's text with links as the site needs them.

    Args:
        text: Markdown, with links relative to its file.
        source: Where that file stands in the repository.
    """

    def rewrite(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), found[2]))
        page = PAGES.get(target, target.removeprefix("docs/"))
        return f"{found[1]}{page}{found[3]}" if "://" not in found[2] else found[0]

    return _LINK.sub(rewrite, text)
