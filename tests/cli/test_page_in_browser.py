"""The page of `runs show --html` in a real browser: Debian's chromium, driven by its own chromedriver."""

import contextlib
import json
import shutil
import subprocess
import urllib.request

import pytest

from fsdplaunch.cli.app import run
from tests.fake_runs import make_run, slow

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER),
    reason="needs chromium and chromedriver: scripts/test --with-system-packages installs them",
)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
    "--disable-component-update", "--disable-default-apps", "--disable-sync", "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)  # fmt: skip
HOSTILE = "<script>document.title='run'</script><img src=x onerror=\"document.title='run'\">"


class Browser:
    """One window, spoken to in the W3C's WebDriver protocol."""

    def __init__(self, address):
        self.address = address

    def ask(self, path, body=None, method="POST"):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.address + path, data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def run(self, script):
        return self.ask("/execute/sync", {"script": f"return {script}", "args": []})

    def open(self, page, width):
        self.ask("/window/rect", {"width": width, "height": 900})
        self.ask("/url", {"url": page.as_uri()})

    def complaints(self):
        return [entry["message"] for entry in self.ask("/se/log", {"type": "browser"})]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    driver = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        said = next(line for line in driver.stdout if "started successfully on port" in line)
        base = f"http://127.0.0.1:{said.rsplit(maxsplit=1)[1].rstrip('.')}"
        options = {
            "binary": CHROMIUM,
            "args": [*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"],
        }
        always = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        session = Browser(base).ask("/session", {"capabilities": {"alwaysMatch": always}})["sessionId"]
        yield Browser(f"{base}/session/{session}")
        with contextlib.suppress(OSError):
            Browser(f"{base}/session/{session}").ask("", method="DELETE")
    finally:
        driver.terminate()
        driver.wait(30)


@pytest.fixture
def page(tmp_path):
    def make(**how):
        make_run(tmp_path / "runs", **how)
        assert (
            run(["runs", "show", "--html", str(tmp_path / "page.html"), "--log-dir", str(tmp_path / "runs")]) == 0
        )
        return tmp_path / "page.html"

    return make


def test_page_draws_every_rank_and_shows_all_texts_as_they_are(page, browser):
    file = page(ranks=4, steps=300, times=slow(2), plan={"script": HOSTILE})
    for width in (1000, 420):
        browser.open(file, width)
        assert browser.run("document.title").startswith(HOSTILE)
        assert browser.run("document.querySelector('h1').textContent").startswith(HOSTILE)
        assert browser.run("document.querySelectorAll('script, img, link, iframe').length") == 0
        assert browser.run("[...document.querySelectorAll('h2')].map(each => each.textContent)") == [
            *("Time of a step, ms", "Waiting for data, % of a step"),
            *("Waiting for others, % of a step", "Memory, GiB"),
        ]
        assert browser.run(
            "[...document.querySelectorAll('svg')].map(s => s.querySelectorAll('polyline').length)"
        ) == ([4] * 4)
        assert browser.run("document.documentElement.scrollWidth <= window.innerWidth")
        # each line is drawn inside its chart, across nearly all of it
        boxes = browser.run(
            "[...document.querySelectorAll('polyline')].map(l => {const a = l.getBoundingClientRect(),"
            " b = l.ownerSVGElement.getBoundingClientRect();"
            " return [a.left - b.left, b.right - a.right, a.top - b.top, b.bottom - a.bottom, a.width / b.width]})"
        )
        assert all(min(box[:4]) >= 0 and box[4] > 0.8 for box in boxes)
    rows = browser.run("[...document.querySelectorAll('.ranks tr')].map(row => row.textContent)")
    assert rows[0] == "ranksteptimespreaddataothersmemory"
    assert rows[3].startswith(">2300310.0 ms")
    # the slow rank waits for nobody: its line is the lowest, and in the colour that says so
    others = "[...document.querySelectorAll('svg')[2].querySelectorAll('polyline')]"
    lowest = browser.run(f"{others}.sort((a, b) => b.getBBox().y - a.getBBox().y)[0].outerHTML")
    assert 'stroke="#d55e00"' in lowest
    assert "<title>rank 2</title>" in lowest
    assert browser.complaints() == []


def test_page_of_many_ranks_and_of_none(page, browser, tmp_path):
    browser.open(page(ranks=70, steps=20, times=slow(69)), 1000)
    assert browser.run("document.querySelector('p').textContent").endswith("64 of 70 ranks, a slow one in orange")
    assert browser.run("document.querySelectorAll('svg')[0].querySelectorAll('polyline').length") == 64
    assert browser.run("document.querySelectorAll('.ranks tr').length") == 71
    shutil.rmtree(tmp_path / "runs")
    browser.open(page(ranks=0), 1000)
    assert browser.run("document.querySelectorAll('svg').length") == 0
    assert "no rank has made a step yet" in browser.run("document.body.textContent")
    assert browser.complaints() == []
