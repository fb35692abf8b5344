"""What holds for all tests."""

import gc
import shutil
import signal
import subprocess
from collections.abc import Generator
from pathlib import Path

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


@pytest.fixture(scope="session")
def gpu_driver(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder with the library of a driver that is not there; the variables that it reads say what it shows."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library = tmp_path_factory.mktemp("driver") / "libnvidia-ml.so.1"
    source = Path(__file__).with_name("fake_nvml.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", str(library), str(source)], check=True)
    return str(library.parent)
