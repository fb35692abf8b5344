"""The page of `estimate --html` in a real browser: Debian's chromium, driven by its own chromedriver."""

import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request

import pytest

from fsdplaunch.display_text import GIB
from fsdplaunch.estimate.html_report import html_report
from fsdplaunch.estimate.memory import MemoryCase, TrainingSetup
from fsdplaunch.estimate.model import describe
from fsdplaunch.estimate.report import make_report
from fsdplaunch.estimate.trace_client import StepTrace
from tests.unit.estimate.conftest import LLAMA

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


class Browser:
    """One window, spoken to in the W3C's WebDriver protocol."""

    def __init__(self, address):
        self.address = address

    def ask(self, path, body):
        request = urllib.request.Request(
            self.address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def run(self, script):
        return self.ask("/execute/sync", {"script": script, "args": []})

    def resize(self, width):
        self.ask("/window/rect", {"width": width, "height": 900})


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    driver = subprocess.Popen([DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        base = f"http://127.0.0.1:{port}"
        wait_for(base)
        profile = tmp_path_factory.mktemp("profile")
        options = {"binary": CHROMIUM, "args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {
            "capabilities": {
                "alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            }
        }
        session = Browser(base).ask("/session", wanted)["sessionId"]
        yield Browser(f"{base}/session/{session}")
        with contextlib.suppress(OSError):
            urllib.request.urlopen(
                urllib.request.Request(f"{base}/session/{session}", method="DELETE"), timeout=30
            )
    finally:
        driver.terminate()
        driver.wait(30)


def wait_for(base):
    for _ in range(100):
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(f"{base}/status", timeout=5).close()
            return
        time.sleep(0.1)
    raise TimeoutError(base)


def report_of(trace=None):
    described = describe(LLAMA, source="config.json")
    setup = TrainingSetup(strategy="FULL_SHARD", world=16, per_node=8, shards=16, master=4, compute=2, reduce=4)
    case = MemoryCase(sizes=described.sizes, shape=described.shape)
    return make_report(
        case, setup, title="a <b> model", model="words", memory=8 * GIB, memory_from="here", exact=trace
    )


@pytest.fixture(scope="module")
def traced():
    course = [("forward", n * GIB // 20) for n in range(60)] + [
        ("backward", (60 - n) * GIB // 10) for n in range(60)
    ]
    return StepTrace(
        parts={"parameters": GIB, "activations": 5 * GIB}, host=0, phase="backward", module="model.layers.3",
        course=(*course, ("step", GIB)), sizes=report_of().case.sizes, messages=(), seconds=3.0,
    )  # fmt: skip


@pytest.fixture
def shown(browser, tmp_path):
    """Return a function that opens a report's page in the browser."""

    def show(report):
        path = tmp_path / "memory.html"
        path.write_text(html_report(report), encoding="utf-8")
        browser.resize(1000)
        browser.ask("/url", {"url": path.as_uri()})
        return report

    return show


def test_bars_are_drawn_as_long_as_their_numbers(browser, shown):
    report = shown(report_of())
    bars = browser.run(
        "return [...document.querySelectorAll('.bar')].map(bar => ({room: bar.getBoundingClientRect().width,"
        " parts: [...bar.querySelectorAll('[data-part]')].map(e => e.getBoundingClientRect().width),"
        " limit: bar.querySelector('.limit').getBoundingClientRect().left - bar.getBoundingClientRect().left}))"
    )
    longest = max([row.need.gpu for row in report.rows] + [report.memory])
    assert len(bars) == len(report.rows)
    for bar, row in zip(bars, report.rows, strict=True):
        assert sum(bar["parts"]) == pytest.approx(bar["room"] * row.need.gpu / longest, abs=2)
        assert bar["limit"] == pytest.approx(bar["room"] * report.memory / longest, abs=4)
    assert browser.run("return document.querySelector('#verdict').innerText").startswith(report.verdict)
    assert browser.run("return document.title") == "a <b> model"
    assert browser.run("return document.querySelectorAll('#moments tr').length") == 5


def test_course_of_a_traced_step_reaches_its_peak(browser, shown, traced):
    shown(report_of(traced))
    heights = browser.run(
        "return [...document.querySelectorAll('#course rect')].map(e => e.getBoundingClientRect().height)"
    )
    assert len(heights) == len(traced.course)
    peak = max(amount for _, amount in traced.course)
    for height, (_, amount) in zip(heights, traced.course, strict=True):
        assert height == pytest.approx(max(heights) * amount / peak, abs=1.5)


@pytest.mark.parametrize("width", [1200, 500])
def test_page_fits_the_window_and_asks_for_nothing(browser, shown, width):
    shown(report_of())
    browser.resize(width)
    assert browser.run("return document.documentElement.scrollWidth <= window.innerWidth")
    assert browser.run("return performance.getEntriesByType('resource').map(e => e.name)") == []
    log = browser.ask("/se/log", {"type": "browser"})
    assert [entry["message"] for entry in log if entry["level"] in ("SEVERE", "WARNING")] == []
