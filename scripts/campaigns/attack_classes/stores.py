"""Those who reach a store of a run and overwrite what stands there: nothing is executed, and the run ends.

Runs on one node: all of their stores are overwritten while they go on, and the file in which their workers meet is
spoilt. Runs on two nodes: whoever reaches the store's port overwrites it, without the secret, and with it.
"""

import contextlib
import os
import pickle
import random
import re
import signal
import subprocess
import tempfile
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from fsdplaunch.run_secret import STORE_KEY, proof
from scripts.campaigns.attack_classes.case import Case
from scripts.campaigns.attack_classes.runs import end_all, launch, launch_two_nodes, variables_of, wait_for

COUNT = 12
_SECRET = "ab" * 32
_OVERWRITE_SECONDS, _MORE_SECONDS = 60.0, 5.0
"""How long stores are looked for, and how long once one was found: what is none says nothing."""
_END_SECONDS = 60.0
"""How long a run may take to end once its script may."""
_SCRIPT = """
import os, time, torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
end = time.time() + 90
while time.time() < end and not os.path.exists("enough"):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    open("up" + os.environ["RANK"], "w").write(os.environ.get("FSDPLAUNCH_STORE_FILE", "none"))
    time.sleep(0.1)
"""
Spoil = Callable[[Path, random.Random], None]


class _Bomb:
    """What makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._path}",)


def cases(chance: random.Random, count: int | None) -> Iterator[Case]:
    """Make the cases: whole runs, each kind in turn."""
    whole = [
        ("a run whose stores are overwritten", overwrite_run),
        *((f"a run whose file is {name}", lambda spoil=spoil: spoil_run(spoil)) for name, spoil in SPOILS.items()),
        ("two nodes, without the secret", lambda: overwrite_two_nodes(known=False)),
        ("two nodes, with the secret", lambda: overwrite_two_nodes(known=True)),
    ]
    chance.shuffle(whole)
    for number in range(count or COUNT):
        name, attack = whole[number % len(whole)]
        yield Case(name=f"{number}: {name}", attack=attack)


def overwrite_run() -> None:
    """Overwrite every key of every store of a run on one node; raise when anything is executed, or it ends ill."""
    with tempfile.TemporaryDirectory() as base:
        folder, done = Path(base), Path(base, "done")
        run = launch(folder, _SCRIPT, "--num-processes", "2")
        wait_for((folder / "up1").exists, [run])
        listeners = listening(descendants(run.pid))
        if outside := [place for place in listeners if not place.startswith("127.")]:
            raise AssertionError(f"it listens at {outside}")
        touched = overwrite(listeners, done)
        (folder / "enough").touch()
        said = end_all([run], _END_SECONDS)
        if done.exists():
            raise AssertionError("what was written was executed")
        if run.returncode != 0 or not touched:
            raise AssertionError(f"ended with {run.returncode} after {touched} stores: {said[0][-2000:]}")


def _append(path: Path, chance: random.Random) -> None:
    with path.open("ab") as file:
        file.write(pickle.dumps(_Bomb(path.parent / "done")) + chance.randbytes(500))


SPOILS: dict[str, Spoil] = {
    "written to": _append,
    "cut": lambda path, chance: os.truncate(path, chance.randrange(path.stat().st_size)),
    "replaced": lambda path, chance: path.write_bytes(chance.randbytes(4000)),
    "removed": lambda path, _chance: path.unlink(),
}


def spoil_run(spoil: Spoil) -> None:
    """Spoil the file in which the workers of a lone node have met; raise when the run does not end or executes."""
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base)
        run = launch(folder, _SCRIPT, "--num-processes", "2", "--process-group-timeout-seconds", "20")
        named = folder / "up1"
        wait_for(lambda: named.exists() and bool(named.read_text()), [run])
        path = Path(named.read_text())
        assert path.is_file(), path  # the case has reached what it is about
        assert path.parent.stat().st_mode & 0o777 == 0o700
        spoil(path, random.Random(1))
        (folder / "enough").touch()
        end_all([run], _END_SECONDS)
        if (path.parent / "done").exists() or path.parent.exists():
            raise AssertionError("something was executed, or left behind")


def overwrite_two_nodes(*, known: bool) -> None:
    """Overwrite the store of a run on two nodes; raise when anything is executed, or a node does not end.

    Args:
        known: With the secret: under the very keys that agents and workers use.
    """
    with tempfile.TemporaryDirectory() as base:
        folder, done = Path(base), Path(base, "done")
        nodes = launch_two_nodes(folder, _SCRIPT, _SECRET)
        wait_for(lambda: (folder / "up0").exists() and (folder / "up1").exists(), nodes)
        family = [pid for node in nodes for pid in descendants(node.pid)]
        variables = [variables_of(pid) for pid in family]
        prefixes = {one[STORE_KEY] for one in variables if STORE_KEY in one} if known else set()
        run_id = next(path.name for path in (folder / "runs").iterdir() if not path.is_symlink())
        prefixes |= {proof(_SECRET, "agents", run_id)} if known else set()
        listeners = listening(family)
        if outside := [place for place in listeners if place.startswith(("0.", "*", "[::]"))]:
            raise AssertionError(f"it listens at {outside}")
        touched = overwrite(listeners, done, *prefixes)
        (folder / "enough").touch()
        end_all(nodes, _END_SECONDS + 30)
        assert touched, "no store was reached"
        if done.exists():
            raise AssertionError("what was written was executed")


def descendants(pid: int) -> list[int]:
    """Return a process and all that it started."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(folder.name))
    found = [pid]
    for one in found:
        found += parents.get(one, [])
    return found


def listening(pids: list[int]) -> list[str]:
    """Return the addresses at which processes listen, as `ss` has them."""
    shown = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout
    return [
        line.split()[3]
        for line in shown.splitlines()
        if {int(pid) for pid in re.findall(r"pid=(\d+)", line)} & set(pids)
    ]


def overwrite(places: list[str], done: Path, *prefixes: str) -> int:
    """Overwrite every key of every store, and those that a run uses; return how many stores there were.

    Args:
        places: Where something listens, as `listening` says.
        done: A file that what is written would make if it was executed.
        prefixes: What the run's own keys begin with, as far as they are known.
    """
    import torch.distributed  # noqa: F401  (once, before the forks; tests of runs that use none of it import this)

    running: dict[int, int | None] = {}
    for place in places:
        pid = os.fork()  # one that meets no store hangs in C, and is killed
        if pid == 0:
            _overwrite_one(place, done, prefixes)
        running[pid] = None
    end = time.monotonic() + _OVERWRITE_SECONDS
    while None in running.values() and time.monotonic() < end:
        time.sleep(0.05)
        for pid in [pid for pid, status in running.items() if status is None]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            running[pid] = status if ended else None
            if running[pid] == 0:
                end = min(end, time.monotonic() + _MORE_SECONDS)
    for pid in [pid for pid, status in running.items() if status is None]:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return sum(status == 0 for status in running.values())


def _overwrite_one(place: str, done: Path, prefixes: Sequence[str]) -> None:
    """Overwrite the store at an address, in a process of its own, which ends with 0 where there was one."""
    import torch.distributed as dist

    host, _, port = place.rpartition(":")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch says much of what is no store
    status = 1
    with contextlib.suppress(Exception):
        store = dist.TCPStore(host.strip("[]"), int(port), None, False, timedelta(seconds=2))
        keys = store.list_keys() if hasattr(store, "list_keys") else []
        names = [f"change0/{name}" for name in ("attempt", "attempt0/port", "attempt0/here", "attempt0/all")]
        own = [f"{prefix}/{name}" for prefix in prefixes for name in names]
        bomb = b64encode(pickle.dumps(_Bomb(done))).decode()
        for key in [*keys, *own, "torch.rendezvous.run", "attempt", "port"]:
            store.set(key, bomb)
        status = 0
    os._exit(status)
