"""Copying shown output, line by line where several ranks share the screen."""

import fcntl
import os
import time

import pytest

from fsdplaunch.agent.output import LONGEST_LINE, OutputRelay, OutputStream, open_log


@pytest.fixture
def screen():
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 1 << 20)
    yield reading, writing
    os.close(reading)
    os.close(writing)


def shown(reading: int) -> str:
    os.set_blocking(reading, False)
    return os.read(reading, 1 << 20).decode()


@pytest.fixture
def source(screen, tmp_path):
    """Return a function that gives (a source, the rank's end of it)."""

    def make(name: str, prefix: bytes = b"") -> tuple[OutputStream, int]:
        ours, theirs = os.pipe()
        file = open_log(tmp_path / name)
        return OutputStream(end=ours, file=file, screen=screen[1], prefix=prefix, is_terminal=False), theirs

    return make


@pytest.fixture
def relay(screen):
    return OutputRelay({"stdout": screen[1], "stderr": screen[1]})


def test_lines_of_two_ranks_are_not_joined(relay, source, screen, tmp_path):
    (one, first), (two, second) = source("one", b"[0] "), source("two", b"[1] ")
    relay.add(one)
    relay.add(two)
    for part in (b"be", b"gin\nand ", b"so on\n"):
        os.write(first, part)
        time.sleep(0.05)
        os.write(second, b"50%\r")
    os.write(second, b"no end")
    os.close(first)
    os.close(second)
    relay.drain(5, failed=False)
    lines = shown(screen[0]).splitlines()
    assert [line for line in lines if line.startswith("[0] ")] == ["[0] begin", "[0] and so on"]
    assert [line for line in lines if line.startswith("[1] ")] == ["[1] 50%"] * 3 + ["[1] no end"]
    assert (tmp_path / "two").read_bytes() == b"50%\r" * 3 + b"no end"


def test_unfinished_line_of_one_rank_is_shown_at_once(relay, source, screen):
    one, first = source("one")
    relay.add(one)
    os.write(first, b"(Pdb) ")
    end = time.monotonic() + 5
    text = ""
    while not text and time.monotonic() < end:
        time.sleep(0.02)
        try:
            text = shown(screen[0])
        except BlockingIOError:
            continue
    assert text == "(Pdb) "
    relay.say("a note")
    assert shown(screen[0]) == "\nfsdplaunch: a note\n"
    os.close(first)
    relay.drain(5, failed=False)


def test_line_without_an_end_does_not_fill_memory(relay, source, screen):
    one, first = source("one", b"[0] ")
    relay.add(one)
    for _ in range(4):
        os.write(first, b"x" * (LONGEST_LINE // 2))
        time.sleep(0.05)
    assert len(one.partial) < LONGEST_LINE
    os.close(first)
    relay.drain(5, failed=False)


def test_stream_that_stays_open_is_let_go_of(relay, source):
    one, first = source("one")
    relay.add(one)
    relay.drain(0.2, failed=False)
    with pytest.raises(BrokenPipeError):
        os.write(first, b"too late")
    os.close(first)


def test_reader_that_has_stopped_is_waited_for_until_patience_is_lost(relay, source, screen):
    fcntl.fcntl(screen[1], fcntl.F_SETPIPE_SZ, 4096)
    one, first = source("one")
    relay.add(one)
    os.write(first, b"x" * 10_000)
    os.close(first)
    asked = []
    relay.drain(0.1, failed=False, until=lambda: asked.append(1) or len(asked) > 3)
    assert len(asked) == 4
    for _ in range(3):  # the copying thread ends well
        shown(screen[0])
        time.sleep(0.05)
    relay.drain(5, failed=False)


def test_screen_that_has_gone_away_does_not_stop_the_copy(source, tmp_path, screen):
    reading, writing = os.pipe()
    os.close(reading)
    relay = OutputRelay({"stdout": writing, "stderr": writing})
    one, first = source("one")
    one.screen = writing
    relay.add(one)
    os.write(first, b"kept")
    os.close(first)
    relay.drain(5, failed=False)
    assert (tmp_path / "one").read_bytes() == b"kept"
    os.close(writing)
