"""Runs in a cgroup whose memory is used up: the kernel kills one of their processes, and the run says so.

A launch ends within seconds, with the signal's status and a report that names the rank and the kernel. Nothing
of it is left, and the newest complete checkpoint is one whole save, also where one was being written.

Needs a memory controller in whose folder a group can be made: cgroup v1's, or v2's where it has one. As root.
"""

import contextlib
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from scripts.campaigns.attack_classes.case import Case
from scripts.campaigns.attack_classes.runs import ROOT, Run, end_all, launch, wait_for
from scripts.campaigns.attack_classes.whole_saves import SAVES, complete_steps, loaded_step, merged_values

COUNT = 10
_MIB = 2**20
LIMIT = 1200 * _MIB
"""Enough for a run of two workers, and little enough to be used up in seconds."""
END_SECONDS = 20.0
"""How long a launch may take to end once the kernel has killed one of its processes."""
_GONE_SECONDS = 12.0
_KILLED = 137
_IN_BACKGROUND = ("--checkpoint.async", "true")
_MOUNT = Path("/sys/fs/cgroup")
_TRAIN = """
import os, time
from pathlib import Path
from scripts.campaigns.attack_classes.memory_limits import grow
from scripts.campaigns.attack_classes.whole_saves import make_training, save
training = make_training(kind=os.environ["KIND"], width=int(os.environ["WIDTH"]))
rank, step = os.environ["RANK"], 1
save(step, training)
if rank == "0":
    Path("saved").touch()
while not Path("enough").exists() and os.environ["DURING_SAVES"] == "0":
    time.sleep(0.05)
if os.environ["DURING_SAVES"] == "1":
    save(2, training)  # begun only once the first is complete, in the background, too
if rank == os.environ["VICTIM"]:
    grow()
for step in range(3, 10_000):
    save(step, training)
    time.sleep(0.01)
"""
_LOADER = """
import os, time
import torch
import fsdplaunch
from pathlib import Path
from scripts.campaigns.attack_classes.memory_limits import grow

class Growing(torch.utils.data.Dataset):
    def __len__(self): return 100_000
    def __getitem__(self, number):
        if os.environ["RANK"] == "1":
            grow()
        time.sleep(0.1)
        return torch.ones(4)

plain = torch.nn.Linear(4, 4)
plugin = fsdplaunch.FullyShardedDataParallelPlugin(auto_wrap_policy="NO_WRAP")
model, optimizer = fsdplaunch.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1), plugin=plugin)
Path("saved").touch()
for batch in torch.utils.data.DataLoader(Growing(), batch_size=2, num_workers=1):
    model(batch).sum().backward()
    optimizer.step()
"""
_EARLY = "import time\ntime.sleep(600)\n"


def grow() -> None:
    """Use more and more memory, from a thread of its own."""
    import threading

    def take() -> None:
        taken = []
        while True:
            taken.append(b"x" * (8 * _MIB))  # written, so that the memory is really there
            time.sleep(0.01)

    threading.Thread(target=take, daemon=True).start()


def cases(chance: random.Random, count: int | None) -> Iterator[Case]:
    """Make the cases: each way in turn; none where no group can be made, which is printed."""
    try:
        with memory_group(LIMIT):
            pass
    except OSError as problem:
        print(f"memory_limits is left out: no cgroup with a limit can be made here: {problem}", file=sys.stderr)
        return
    ways: list[tuple[str, Callable[[], None]]] = [
        ("rank 1 grows", lambda: use_up(victim="1")),
        ("rank 0 grows", lambda: use_up(victim="0")),
        ("rank 1 grows during saves", lambda: use_up(victim="1", during="1", seconds=chance.uniform(0, 1))),
        ("rank 0 grows during full saves", lambda: use_up(victim="0", during="1", kind="FULL_STATE_DICT")),
        (
            "rank 1 grows during saves in the background",
            lambda: use_up(victim="1", during="1", words=_IN_BACKGROUND),
        ),
        ("rank 0 grows with a restart", lambda: use_up(victim="0", words=("--max-restarts", "1"))),
        ("rank 1 grows in a fresh interpreter", lambda: use_up(victim="1", words=("--launch.preload", "none"))),
        ("a data loader's process grows", kill_loader),
        ("too little for torch", lambda: begin_with(60 * _MIB)),
        ("too little for two workers", lambda: begin_with(150 * _MIB)),
    ]
    for number in range(count or COUNT):
        name, attack = ways[number % len(ways)]
        yield Case(name=f"{number}: {name}", attack=attack)


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[Path]:
    """Make a cgroup below this process's own, or where that cannot be at the top; it is gone at the end.

    Raises:
        OSError: None can be made.
    """
    name, problem = f"fsdplaunch-attack-{os.getpid()}-{os.urandom(3).hex()}", OSError("no memory controller")
    for folder, limits in _places():
        group = folder / name
        try:
            group.mkdir()
            for each in limits:
                with contextlib.suppress(FileNotFoundError):  # a kernel without accounting of swap
                    (group / each).write_text(str(limit) if "swap.max" not in each else "0")
            break
        except OSError as error:
            problem = error
            with contextlib.suppress(OSError):
                group.rmdir()
    else:
        raise problem
    try:
        yield group
    finally:
        end = time.monotonic() + _GONE_SECONDS
        while group.exists() and time.monotonic() < end:
            for pid in (group / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), 9)
            with contextlib.suppress(OSError):
                group.rmdir()
            time.sleep(0.05)


def _places() -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield folders that have a memory controller, with the files that limit a group there."""
    own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    if "memory" in own:
        limits = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
        for place in (own["memory"].lstrip("/"), ""):
            yield _MOUNT / "memory" / place, limits
    for mount in (_MOUNT, _MOUNT / "unified"):
        controllers = mount / "cgroup.subtree_control"
        if controllers.exists() and "memory" in controllers.read_text().split():
            yield mount, ("memory.max", "memory.swap.max")


def _enter(group: Path) -> Callable[[], object]:
    return lambda: (group / "cgroup.procs").write_text(str(os.getpid()))


def _members(group: Path) -> list[str]:
    return (group / "cgroup.procs").read_text().split()


def kills_in(group: Path) -> int:
    """Return how many processes the kernel has killed in a group."""
    for name in ("memory.oom_control", "memory.events"):
        with contextlib.suppress(OSError):
            return int(re.findall(r"^oom_kill (\d+)", (group / name).read_text(), re.MULTILINE)[0])
    return 0


def use_up(
    *,
    victim: str,
    during: str = "0",
    kind: str = "SHARDED_STATE_DICT",
    seconds: float = 0.3,
    words: tuple[str, ...] = (),
) -> None:
    """Have one rank grow until it is killed; raise when the end is late, unclear, or something is lost or left."""
    with tempfile.TemporaryDirectory() as base, memory_group(LIMIT) as group:
        folder, width = Path(base), 16 if during == "0" else 512
        about = {"KIND": kind, "WIDTH": str(width), "VICTIM": victim, "DURING_SAVES": during}
        options = ("--num-processes", "2", *words)
        run = launch(folder, _TRAIN, *options, prepare=_enter(group), PYTHONPATH=str(ROOT), **about)
        wait_for(lambda: (folder / "saved").exists() and bool(complete_steps(folder / SAVES)), [run])
        before = complete_steps(folder / SAVES)
        time.sleep(seconds)
        (folder / "enough").touch()
        restarts = int("--max-restarts" in words)
        said = _end(run, group, restarts)
        assert run.returncode == _KILLED, f"ended with {run.returncode}: {said[-2000:]}"
        assert f"rank {victim}" in said.lower(), said[-2000:]
        assert "the kernel killed it: the memory limit" in said, said[-2000:]
        after = complete_steps(folder / SAVES)
        assert after[-1] >= before[-1], (before, after)
        step = loaded_step(folder, kind=kind, width=width)
        assert step == after[-1] or (step in after and restarts), (step, after)  # a second attempt counts anew
        assert merged_values(folder / SAVES / f"checkpoint-{step}", folder / "merged") == {float(step)}


def _end(run: "Run[str]", group: Path, restarts: int = 0) -> str:
    """Wait for a kill and, within seconds, the end of the launch; return what it said."""
    wait_for(lambda: kills_in(group) > restarts or run.poll() is not None, [])
    start = time.monotonic()
    (said,) = end_all([run], END_SECONDS)
    assert kills_in(group), f"the kernel has killed nothing: {said[-2000:]}"
    assert "Traceback" not in said.partition("fsdplaunch: ")[0], said[-2000:]
    end = start + END_SECONDS
    while (left := _members(group)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left, f"{len(left)} processes were left"
    return said


def kill_loader() -> None:
    """Have a data loader's process grow; raise when the run does not end soon and say what was killed."""
    with tempfile.TemporaryDirectory() as base, memory_group(LIMIT) as group:
        run = launch(Path(base), _LOADER, "--num-processes", "2", prepare=_enter(group), PYTHONPATH=str(ROOT))
        wait_for(Path(base, "saved").exists, [run])
        said = _end(run, group)
        assert run.returncode == 1, f"ended with {run.returncode}: {said[-2000:]}"
        assert "rank 1" in said.lower(), said[-2000:]
        assert "memory limit" in said, said[-2000:]


def begin_with(limit: int) -> None:
    """Begin a run in too little memory; raise when it does not end soon, with an error of its own."""
    with tempfile.TemporaryDirectory() as base, memory_group(limit) as group:
        run = launch(Path(base), _EARLY, "--num-processes", "2", prepare=_enter(group))
        said = _end(run, group)
        assert run.returncode not in (0, None), said[-2000:]
        assert "memory" in said, (run.returncode, said[-2000:])
