"""Keep the line that gloo prints for every process group off a worker's standard output.

torch 2.8 to 2.10 brought a gloo that writes it from C++, whatever the log level is. A script's output may be read
by a program, so the line is taken out where it arises; anything else written meanwhile is passed on.
"""

import ctypes
import functools
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fsdplaunch.probe.torch_version import PRINTING_GLOO, installed_numbers
from fsdplaunch.standard_streams import flush

_LINE = re.compile(rb"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. [^\n]*\n")
_swapping = threading.Lock()


def keep_gloo_quiet() -> None:
    """Take the line out of what making a gloo group prints, here and for the script's own groups."""
    if installed_numbers() not in PRINTING_GLOO:
        return
    from torch.distributed import distributed_c10d

    gloo: Any = getattr(distributed_c10d, "ProcessGroupGloo", None)
    if gloo is None:
        return
    make = gloo.__init__

    @functools.wraps(make)
    def make_quietly(self: Any, *args: Any, **kwargs: Any) -> None:
        with without_gloo_lines():
            make(self, *args, **kwargs)

    gloo.__init__ = make_quietly


@contextmanager
def without_gloo_lines() -> Iterator[None]:
    """Take gloo's lines out of all that is written to file descriptor 1 inside."""
    with _swapping:
        _flush()
        kept, file = os.dup(1), os.memfd_create("stdout")
        os.dup2(file, 1)
        try:
            yield
        finally:
            _flush()
            os.dup2(kept, 1)
            _pass_on(file)
            os.close(kept)
            os.close(file)


def _flush() -> None:
    """Write out what Python and the C library hold back for descriptor 1."""
    flush(sys.stdout)
    ctypes.CDLL(None).fflush(None)


def _pass_on(file: int) -> None:
    text = os.pread(file, os.fstat(file).st_size, 0)
    rest = _LINE.sub(b"", text)
    while rest:
        rest = rest[os.write(1, rest) :]
