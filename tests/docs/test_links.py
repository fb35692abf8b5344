"""The documents as a site and as files of a repository: no link and no anchor leads nowhere."""

import os
import subprocess
import sys

import pytest

from tests.docs.pages import PAGES, ROOT, anchors, links


def test_site_builds_in_strict_mode(tmp_path):
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(tmp_path / "site"),
    ]
    environ = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'class="mermaid"' in (tmp_path / "site/architecture/index.html").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page):
    wrong = []
    for link in links(page):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.is_file() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    assert wrong == []


def test_every_page_is_reached_from_the_readme():
    named = {(ROOT / link.partition("#")[0]).resolve() for link in links(ROOT / "README.md")}
    named |= {(ROOT / link).resolve() for link in links(ROOT / "CONTRIBUTING.md")}
    assert set((ROOT / "docs").glob("*.md")) <= named


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200
