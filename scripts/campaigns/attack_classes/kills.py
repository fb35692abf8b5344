"""Runs whose processes are stopped, interrupted and killed at any moment: nothing of them is left behind.

No process, no folder in memory, and no hidden file once the next run, or the next save, has been there.
"""

import contextlib
import fcntl
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from fsdplaunch.private_dir import remove_abandoned_dirs
from scripts.campaigns.attack_classes.case import Case
from scripts.campaigns.attack_classes.runs import environ, launch
from scripts.campaigns.attack_classes.stores import descendants

COUNT = 60
GONE_SECONDS = 12.0
"""How long a run may be there after its launcher: a grace for the workers, and one for the agent."""
_SCRIPT = "import time\ntime.sleep(600)\n"
_WORKERS = ("--num-processes", "2")
_COMMANDS = (["--help"], ["config", "validate"], ["launch", "train.py"], ["merge-weights", "ck", "out"])
_MEMORY = Path("/dev/shm")


def cases(chance: random.Random, count: int | None) -> Iterator[Case]:
    """Make the cases: mostly Ctrl-C in the first moments of any command, and runs that are killed."""
    for number in range(count or COUNT):
        if number % 4:
            seconds, command = chance.uniform(0, 0.4), _COMMANDS[number // 4 % 4]
            name = f"{number}: Ctrl-C {1000 * seconds:.0f} ms into {command[0]}"
            yield Case(name=name, attack=lambda s=seconds, c=command: interrupt(c, s))
        else:
            seed = chance.random()
            yield Case(name=f"{number}: kill", attack=lambda seed=seed: kill_some(random.Random(seed)))


def kill_some(chance: random.Random) -> None:
    """Kill one process of a run, or several, perhaps stop another before; raise when anything is left."""
    with tempfile.TemporaryDirectory() as folder:
        before = _private_dirs()
        run = launch(Path(folder), _SCRIPT, *_WORKERS)
        time.sleep(chance.choice([chance.uniform(0.2, 3), chance.uniform(2, 9)]))
        family = descendants(run.pid)
        if chance.random() < 0.4 and len(family) > 1:
            with contextlib.suppress(ProcessLookupError):  # one of them answers no signal, as if it was stuck
                os.kill(chance.choice(family[1:]), signal.SIGSTOP)
        victims = {*chance.sample(family, min(len(family), chance.choice([1, 1, 2, 9])))}
        family = descendants(run.pid)
        for pid in victims | ({run.pid} if chance.random() < 0.5 else set()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if run.poll() is None and not victims & set(family[:2]):
            run.kill()  # of a worker's death, the run tells in its own time
        run.communicate(timeout=60)
        _check_gone(family)
        remove_abandoned_dirs()  # as the next launcher does
        made = _private_dirs() - before
        if any(not _is_held(_MEMORY / name) for name in made):  # of a case beside this one, perhaps
            time.sleep(1)
            remove_abandoned_dirs()
        if left := [name for name in made if not _is_held(_MEMORY / name)]:
            raise AssertionError(f"left in memory: {left}")


def interrupt(command: list[str], seconds: float) -> None:
    """Press Ctrl-C; raise when there is a traceback, a status that is not the command's or Ctrl-C's, or a rest."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(_SCRIPT)
        (Path(folder) / "fsdp.yaml").write_text("use_cpu: true\nnum_processes: 2\n")
        (Path(folder) / "ck").mkdir()
        before = {path.name for path in Path(folder).iterdir()}
        run = subprocess.Popen(
            [sys.executable, "-c", "import sys; from fsdplaunch.__main__ import main; main()", *command],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environ(),
            start_new_session=True,
            preexec_fn=_hear_interrupts,  # noqa: PLW1509  (it only sets a signal)
        )
        _wait_until_ours(run)
        time.sleep(seconds)
        family = descendants(run.pid)
        with contextlib.suppress(ProcessLookupError):
            run.send_signal(signal.SIGINT)
        _, said = run.communicate(timeout=60)
        own = (0,) if command[0] != "merge-weights" else (1, 2)
        if "Traceback" in said or "Exception ignored" in said or run.returncode not in (130, -signal.SIGINT, *own):
            raise AssertionError(f"status {run.returncode}: {said[-1500:]}")
        _check_gone(family)
        left = {path.name for path in Path(folder).iterdir()} - before - {"runs"}
        if left:
            raise AssertionError(f"written: {left}")


def _hear_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _wait_until_ours(run: "subprocess.Popen[str]") -> None:
    """Wait until this package's code runs: it takes over the handler that Python set in its own start."""
    end, was_set = time.monotonic() + 10, False
    while time.monotonic() < end and run.poll() is None:
        with contextlib.suppress(OSError, StopIteration):
            status = Path(f"/proc/{run.pid}/status").read_text()
            caught = int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")), 16)
            is_set = bool(caught >> (signal.SIGINT - 1) & 1)
            if was_set and not is_set:
                return
            was_set = is_set or was_set


def _private_dirs() -> set[str]:
    return {path.name for path in _MEMORY.glob("fsdplaunch-run-*")}


def _is_held(folder: Path) -> bool:
    """Return whether a run uses a folder: other people's may go on beside this campaign."""
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return not folder.exists()
    return True


def _check_gone(pids: list[int]) -> None:
    end = time.monotonic() + GONE_SECONDS
    while (left := [pid for pid in pids if _is_alive(pid)]) and time.monotonic() < end:
        time.sleep(0.05)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if left:
        raise AssertionError(f"{len(left)} processes were left")


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
