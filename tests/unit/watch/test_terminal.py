"""`watch` and `launch --live` on a real terminal: keys, another size, and that it is left as it was."""

import os
import re
import signal
import sys
from pathlib import Path

import pexpect
import pytest

from tests.fake_runs import make_run, slow

ROOT = Path(__file__).parents[3]
SCREEN_ON, SCREEN_OFF = "\x1b[?1049h", "\x1b[?1049l"
SCROLLS, ALL_SCROLL = re.compile(r"\x1b\[1;(\d+)r"), "\x1b[r"
LIVE = """
import sys
from pathlib import Path
from fsdplaunch.cli.output import Output
from fsdplaunch.watch.command import live_view
with live_view(Path("runs/latest"), Output()):
    print("\\n".join(f"line {number}" for number in range(50)), flush=True)
    sys.stdin.readline()
print("after", flush=True)
"""


@pytest.fixture
def start(tmp_path):
    make_run(tmp_path / "runs", ranks=4, times=slow(2), runs=True)
    started = []

    def start(*words: str, size=(24, 80), **env: str) -> pexpect.spawn:
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "CI": "", **env}
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            environ.pop(name, None)
        child = pexpect.spawn(
            sys.executable, [*words], cwd=tmp_path, env=environ, dimensions=size, encoding="utf-8", timeout=20
        )
        started.append(child)
        return child

    yield start
    for child in started:
        child.close(force=True)


def test_screen_answers_keys_and_another_size_and_leaves_the_terminal_as_it_was(start):
    child = start("-m", "fsdplaunch", "watch")
    child.expect_exact(SCREEN_ON)
    child.expect_exact("rank 2 is slow (compute): 3.0 times the others' own time, and they wait for it")
    child.expect("rank +step +time +spread +data +others +memory")
    child.send("l")
    child.expect_exact("printed last")
    child.expect_exact("loss 3.5")
    child.setwinsize(24, 60)
    child.expect("3.0 times the others' own time,\\S* *\r\n\\S*and they wait")
    child.send("q")
    child.expect_exact(SCREEN_OFF)
    child.expect(pexpect.EOF)
    child.wait()
    assert child.exitstatus == 0


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_signals_leave_the_terminal_as_it_was(start, number, status):
    child = start("-m", "fsdplaunch", "watch")
    child.expect_exact("q quits, the run goes on")
    child.kill(number)
    child.expect_exact(SCREEN_OFF)
    child.expect(pexpect.EOF)
    child.wait()
    assert child.exitstatus == status


def test_live_view_scrolls_the_output_above_it_and_gives_all_lines_back(start):
    child = start("-c", LIVE)
    child.expect(SCROLLS)
    assert child.match[1] == "14"
    child.expect_exact("\x1b[15;1H")
    child.expect_exact("train.py")
    child.expect_exact("rank 2 is slow (compute)")
    child.setwinsize(12, 60)
    child.expect(SCROLLS)
    assert child.match[1] == "6"
    child.sendline()
    child.expect_exact(ALL_SCROLL)
    child.expect_exact("after")
    child.expect(pexpect.EOF)


def test_live_view_is_a_note_where_there_is_no_terminal(start):
    child = start("-c", LIVE, CI="1")
    child.expect_exact("note:")
    child.expect_exact("--live needs a terminal; fsdplaunch watch shows the run from another one")
    child.expect_exact("line 49")
    child.sendline()
    child.expect_exact("after")
    child.expect(pexpect.EOF)
