"""Two processes that write one folder: the second is told who the first is, and a dead one keeps nobody out."""

import os
import signal
import subprocess
import sys

import pytest

from fsdplaunch.checkpoint.output_folder import FolderLock
from fsdplaunch.errors import CheckpointError

_HOLD = """
import sys, time
from pathlib import Path
from fsdplaunch.checkpoint.output_folder import FolderLock
lock = FolderLock(Path(sys.argv[1]))
lock.acquire()
print("held", flush=True)
time.sleep(600)
"""


def test_second_writer_is_refused_until_the_first_is_dead(tmp_path):
    folder, env = tmp_path / "ckpt", {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    other = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(folder)], stdout=subprocess.PIPE, env=env, text=True
    )
    try:
        assert other.stdout.readline() == "held\n"
        lock = FolderLock(folder)
        with pytest.raises(CheckpointError, match=f"ckpt is being written by process {other.pid} on ") as caught:
            lock.acquire()
        assert os.uname().nodename in caught.value.message
        assert not lock.is_held
        lock.release()  # of a lock that is not held, nothing
        other.send_signal(signal.SIGKILL)
        other.wait()
        lock.acquire()
        assert lock.is_held
        lock.release()
        assert list(tmp_path.iterdir()) == []
    finally:
        other.kill()
        other.wait()


def test_lock_is_taken_again_and_again_and_a_strange_note_does_no_harm(tmp_path):
    first, second = FolderLock(tmp_path / "c"), FolderLock(tmp_path / "c")
    for _ in range(3):
        first.acquire()
        first.acquire()
        (tmp_path / ".c.lock").write_bytes(b"[" * 5000)
        with pytest.raises(CheckpointError, match="is being written by another process"):
            second.acquire()
        first.release()
        second.acquire()
        second.release()


def test_what_is_no_lock_file_is_said_and_not_written_through(tmp_path):
    place, target = tmp_path / ".c.lock", tmp_path / "precious"
    target.write_text("kept")
    for make in (lambda: place.symlink_to(target), lambda: os.mkfifo(place), place.mkdir):
        make()
        with pytest.raises(CheckpointError, match=r"c cannot be locked: .*\.c\.lock"):
            FolderLock(tmp_path / "c").acquire()
        place.rmdir() if place.is_dir() else place.unlink()
    assert target.read_text() == "kept"
