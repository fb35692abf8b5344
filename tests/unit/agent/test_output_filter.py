"""What the terminal is spared."""

import pytest

from fsdplaunch.agent.output import OutputFilter
from fsdplaunch.run_dir import BEGIN_HIDDEN, END_HIDDEN

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


def test_other_warnings_of_torch_are_shown():
    line = b"[W1120 10:00:00.1 Context.cpp:80] Warning: something else (function f)\n"
    assert through(line, 7) == (line, line)


def test_a_mark_that_never_ends_hides_the_rest():
    assert through(b"a" + BEGIN_HIDDEN + b"b", 3) == (b"ab", b"a")
