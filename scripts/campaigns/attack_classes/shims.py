"""Libraries in C that stand between a run and the C library (LD_PRELOAD), compiled when they are first needed."""

import fcntl
import os
import subprocess
import tempfile
from pathlib import Path


def shim(name: str) -> str:
    """Compile `NAME.c` beside this file; return the library's path, the same for all cases of a campaign.

    Raises:
        AssertionError: It cannot be compiled.
    """
    built = Path(tempfile.gettempdir(), f"{name}.so")
    with Path(tempfile.gettempdir(), f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            part = built.with_suffix(".part")
            source = Path(__file__).with_name(f"{name}.c")
            words = [os.environ.get("CC", "gcc"), "-O2", "-shared", "-fPIC", "-o", str(part), str(source), "-ldl"]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[-2000:]
            part.rename(built)
    return str(built)
