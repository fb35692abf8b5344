"""What holds for all tests."""

import gc
import signal
from collections.abc import Generator

import pytest

# Started with nohup every process below would ignore SIGHUP, as it should, and SIGINT when a script started it
# with `&`; these tests send both.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector off libraries and tests: they are not garbage, and every process has them all."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
