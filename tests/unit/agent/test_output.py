"""Which streams reach the terminal, what of them it is spared, and how several ranks share it."""

import fcntl
import os
import time
from contextlib import suppress

import pytest

from fsdplaunch.agent.output import LONGEST_LINE, OutputFilter, OutputRelay, open_log
from fsdplaunch.agent.worker_spec import is_shown
from fsdplaunch.config.schema.config import LaunchSection
from fsdplaunch.run_dir import BEGIN_HIDDEN, END_HIDDEN


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
def relay(screen):
    return OutputRelay({"stdout": screen[1], "stderr": screen[1]})


@pytest.fixture
def begin(relay, tmp_path):
    """Return a function that gives a shown rank's end of its output."""

    def make(name: str, prefix: bytes = b"") -> int:
        return relay.show(open_log(tmp_path / name), "stdout", prefix=prefix)

    return make


@pytest.mark.parametrize(("prefix", "text"), [(b"", b"(Pdb) "), (b"[0] ", b"x" * LONGEST_LINE)])
def test_unfinished_line_of_one_rank_is_shown_at_once_and_a_very_long_one_of_several(
    relay, begin, screen, prefix, text
):
    first = begin("one", prefix)
    os.write(first, text)
    seen, end = "", time.monotonic() + 0.9  # of several ranks a short one waits longer
    while len(seen) < len(text) and time.monotonic() < end:
        time.sleep(0.02)
        with suppress(BlockingIOError):
            seen += shown(screen[0])
    assert seen.strip("\n") == (prefix + text).decode()
    relay.say("a note")
    assert shown(screen[0]) == ("" if prefix else "\n") + "fsdplaunch: a note\n"
    os.close(first)
    relay.drain(5, failed=False)


def test_reader_that_has_stopped_is_waited_for_until_patience_is_lost(relay, begin, screen):
    fcntl.fcntl(screen[1], fcntl.F_SETPIPE_SZ, 4096)
    first, asked = begin("one"), []
    os.write(first, b"x" * 10_000)
    os.close(first)
    relay.drain(0.1, failed=False, until=lambda: asked.append(1) or len(asked) > 3)
    assert len(asked) == 4
    for _ in range(3):  # the copying thread ends well
        shown(screen[0])
        time.sleep(0.05)
    relay.drain(5, failed=False)


def test_screen_that_has_gone_away_does_not_stop_the_copy(relay, begin, tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    relay.screens["stdout"] = writing
    first = begin("one")
    os.write(first, b"kept")
    os.close(first)
    relay.drain(5, failed=False)
    assert (tmp_path / "one").read_bytes() == b"kept"
    os.close(writing)


MARKED = b"before\n" + BEGIN_HIDDEN + b"Traceback\n  \x00 line\n" + END_HIDDEN + b"after"
ALARM = (
    b"[rank0]:[W1120 10:00:00.1 ProcessGroupNCCL.cpp:15] WARNING: destroy_process_group() was not called\n"
    b"[W1120 10:00:00.2 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=3): Connection reset by peer\n"
    b"Exception raised from recvBytes at /pytorch/Utils.hpp:679 (most recent call first):\n"
    b"frame #0: c10::Error::Error() + 0x80 (0x7f)\n"
    b"frame #1: clone + 0x44\n"
    b"\n"
)


def through(data, size, *, failed=False):
    output_filter = OutputFilter()
    parts = [output_filter.part(data[start : start + size]) for start in range(0, len(data), size)]
    parts.append(output_filter.end(failed=failed))
    return b"".join(part[0] for part in parts), b"".join(part[1] for part in parts)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_marked_text_reaches_the_file_only_and_marks_neither(size):
    assert through(MARKED, size) == (b"before\nTraceback\n  \x00 line\nafter", b"before\nafter")


@pytest.mark.parametrize("size", [1, 50, 10_000])
def test_alarms_are_dropped_after_a_good_end_and_shown_after_a_failure(size):
    data = b"step 1\n" + ALARM + b"done\n"
    assert through(data, size) == (data, b"step 1\ndone\n")
    file, shown = through(data, size, failed=True)
    assert file == data
    assert sorted(shown.splitlines()) == sorted(data.splitlines())


@pytest.mark.parametrize(
    "text", [b"[W not a log line\n", b"[rank0]: my own line\n", b"50%|###", b"", b"\n\n", b"\r1/2\r2/2"]
)
def test_other_text_passes_untouched_at_once(text):
    output_filter = OutputFilter()
    file, shown = output_filter.part(text)
    assert file == text
    assert shown + output_filter.end(failed=False)[1] == text
    assert shown == text or text.startswith(b"[")


def test_other_warnings_of_torch_are_shown_and_a_mark_that_never_ends_hides_the_rest():
    line = b"[W1120 10:00:00.1 Context.cpp:80] Warning: something else (function f)\n"
    assert through(line, 7) == (line, line)
    assert through(b"a" + BEGIN_HIDDEN + b"b", 3) == (b"ab", b"a")


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ({}, {"0out", "0err"}),
        ({"show_ranks": "all"}, {"0out", "0err", "1out", "1err", "2out", "2err"}),
        ({"show_ranks": "1,2"}, {"1out", "1err", "2out", "2err"}),
        ({"tee": "3"}, {"0out", "0err", "1out", "1err", "2out", "2err"}),
        ({"tee": "1:2"}, {"0out", "0err", "1err"}),
        ({"redirects": "3"}, set()),
        ({"redirects": "1"}, {"0err"}),
        ({"redirects": "3", "tee": "0:1"}, {"0out"}),
        ({"redirects": "0:1", "show_ranks": "all"}, {"0err", "1out", "1err", "2out", "2err"}),
        ({"show_local_ranks": "2"}, {"2out", "2err"}),
        ({"show_local_ranks": "all"}, {"0out", "0err", "1out", "1err", "2out", "2err"}),
        ({"show_local_ranks": "2", "tee": "3"}, {"2out", "2err"}),
        ({"show_local_ranks": "1,2", "redirects": "1"}, {"1err", "2err"}),
    ],
)
def test_streams_shown_of_three_ranks(said, shown):
    launch = LaunchSection(**said)
    streams = {
        f"{rank}{stream[3:]}"
        for rank in range(3)
        for stream in ("stdout", "stderr")
        if is_shown(launch, rank=rank, local_rank=rank, stream=stream)
    }
    assert streams == shown


def test_show_ranks_counts_over_machines_and_show_local_ranks_on_each():
    assert not is_shown(LaunchSection(), rank=4, local_rank=0, stream="stdout")
    assert is_shown(LaunchSection(show_local_ranks="0"), rank=4, local_rank=0, stream="stdout")
