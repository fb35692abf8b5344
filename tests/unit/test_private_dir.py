"""Private folders: locked while their processes live, removed by the next one where these were killed."""

import errno
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fsdplaunch import private_dir
from fsdplaunch.private_dir import make_private_dir, make_process_dir, remove_private_dir
from fsdplaunch.run_secret import PRIVATE_DIR

MAKES_AND_WAITS = """
import os, sys, time
from fsdplaunch import private_dir
private_dir._MEMORY = sys.argv[1]
private_dir.make_private_dir(os.environ)
if os.fork() == 0:
    time.sleep(60)
print(os.environ["FSDPLAUNCH_PRIVATE_DIR"], os.getpid(), flush=True)
time.sleep(60)
"""


@pytest.fixture
def memory(tmp_path, monkeypatch) -> Path:
    """Stands for /dev/shm."""
    monkeypatch.setattr(private_dir, "_MEMORY", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def make() -> Path:
    environ: dict[str, str] = {}
    make_private_dir(environ)
    return Path(environ[PRIVATE_DIR])


def test_full_memory_is_passed_over_and_left_clean(memory, monkeypatch, tmp_path_factory):
    disk, allocate = tmp_path_factory.mktemp("disk"), os.posix_fallocate
    monkeypatch.setattr("tempfile.tempdir", str(disk))

    def allocate_on_disk(file: int, start: int, size: int) -> None:
        if Path(f"/proc/self/fd/{file}").readlink().is_relative_to(memory):
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(file, start, size)

    monkeypatch.setattr(os, "posix_fallocate", allocate_on_disk)
    folder = make()
    assert (folder.parent, list(folder.iterdir()), list(memory.iterdir())) == (disk, [], [])


def test_next_folder_removes_those_of_killed_processes_alone(memory):
    command = [sys.executable, "-c", MAKES_AND_WAITS, str(memory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as run:
        folder = Path(run.stdout.readline().split()[0])
        own = make()
        assert folder.is_dir()
        run.kill()
        run.wait()
        time.sleep(0.05)
        make()
        assert folder.is_dir()  # its fork still lives
        os.killpg(run.pid, signal.SIGKILL)
    end = time.monotonic() + 10
    while folder.exists() and time.monotonic() < end:
        make()
    assert not folder.exists()
    assert own.is_dir()


def test_what_is_not_a_private_folder_of_ours_is_left_alone(memory):
    elsewhere = memory / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    (memory / "fsdplaunch-run-link").symlink_to(elsewhere)
    (memory / "fsdplaunch-run-file").touch()
    (memory / "fsdplaunch-run-open").mkdir(mode=0o755)
    os.mkfifo(memory / "fsdplaunch-run-pipe")
    (memory / "fsdplaunch-abcd1234").mkdir(mode=0o700)  # an older version's, which has no lock
    before = {path.name for path in memory.iterdir()}
    make()
    assert {path.name for path in memory.iterdir()} > before
    assert (elsewhere / "kept").exists()


def test_folder_that_another_process_takes_for_abandoned_is_made_again(memory, monkeypatch):
    made, real = [], private_dir.tempfile.mkdtemp

    def make_and_lose(**where) -> str:
        made.append(real(**where))
        if len(made) == 1:
            Path(made[0]).rmdir()
        return made[-1]

    monkeypatch.setattr("tempfile.mkdtemp", make_and_lose)
    assert make() == Path(made[1])


def test_folder_of_a_command_goes_with_its_process(memory):
    code = "import tempfile, sys; tempfile.tempdir = sys.argv[1]\n"
    code += "from fsdplaunch.private_dir import make_process_dir\nprint(make_process_dir(), flush=True)"
    said = subprocess.run([sys.executable, "-c", code, str(memory)], capture_output=True, text=True, check=True)
    assert said.stdout.startswith(str(memory))
    assert not Path(said.stdout.strip()).exists()
    assert make_process_dir().is_dir()


def test_folder_is_this_users_alone_whatever_the_umask_and_goes_when_asked(memory):
    before, environ = os.umask(0o777), {}
    try:
        make_private_dir(environ)
    finally:
        os.umask(before)
    folder = Path(environ[PRIVATE_DIR])
    assert (folder.parent, stat.S_IMODE(folder.stat().st_mode)) == (memory, 0o700)
    (folder / "attempt0").write_text("x")
    remove_private_dir(environ)
    assert list(memory.iterdir()) == []
