"""Scripts for DistributedDataParallel, unchanged: sharded, they compute and write what torchrun's ranks do."""

import re
from pathlib import Path

import pytest

from tests.needs import needs
from tests.scripts.conftest import PROGRAMS, Forks, Run
from tests.scripts.test_programs import assert_same, assert_sharded, read

DDP = PROGRAMS / "ddp"
ONLY_NEWER = {"adversarial": needs("torch", "2.11", "itself cannot pass twice through DDP with BatchNorm")}
NAMES = [
    pytest.param(name, marks=ONLY_NEWER.get(name, ())) for name in sorted(path.stem for path in DDP.glob("*.py"))
]
LOSS = re.compile(r"loss (-?\d+\.\d+)")


def _without_us(forks: Forks, script: Path | str, folder: Path, ranks: int, *arguments: str) -> Run:
    """Run a script in plain torch: some of gloo's ranks hang or are aborted by torch itself at their exit."""
    for attempt in range(4):
        done = forks.run(script, folder / str(attempt), *arguments, ranks=ranks, torchrun=True)
        if not any(done.codes):
            break
    assert not any(done.codes), done.err
    return done


def losses(text: str) -> list[float]:
    return [float(found) for found in LOSS.findall(text)]


@pytest.mark.parametrize("name", NAMES)
def test_ddp_script_computes_and_writes_sharded_what_it_does_replicated(
    forks: Forks, tmp_path: Path, name: str
) -> None:
    wanted = _without_us(forks, DDP / f"{name}.py", tmp_path / "torchrun", 2)
    done = forks.passes(DDP / f"{name}.py", tmp_path / "sharded", ranks=2)
    for ours, theirs in zip(done.out, wanted.out, strict=True):
        assert losses(theirs)
        assert losses(ours) == pytest.approx(losses(theirs), rel=1e-6, abs=1e-6)
    assert_sharded(done)
    assert ", for the script, " in done.err[0]
    written = sorted(path.name for path in wanted.folder.iterdir())
    assert written == sorted(path.name for path in done.folder.iterdir())
    for file in written:
        assert_same(read(wanted.folder / file), read(done.folder / file), file)


SPAWNED = """
import os, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP

def train(rank, world, how):
    os.environ.setdefault("MASTER_PORT", "29500")
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss = model(torch.randn(2, 8, 4)[rank]).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    os.write(1, f"rank {rank} loss {loss.item():.6f}\\n".encode())  # whole, beside other processes
    dist.destroy_process_group()

if __name__ == "__main__":
    how, world = sys.argv[1], int(sys.argv[2])
    if how == "here":
        train(int(os.environ["RANK"]), world, how)
    elif how == "spawn":
        mp.spawn(train, args=(world, how), nprocs=world)
    else:
        started = [mp.get_context(how).Process(target=train, args=(rank, world, how)) for rank in range(world)]
        for process in started:
            process.start()
        for process in started:
            process.join()
            assert process.exitcode == 0
"""


def test_ranks_that_a_script_spawns_are_the_launched_workers(forks: Forks, tmp_path: Path) -> None:
    wanted = _without_us(forks, SPAWNED, tmp_path / "plain", 2, "here", "2")
    done = forks.passes(SPAWNED, tmp_path / "run", "spawn", "2", ranks=2)
    assert sorted(_of_ranks("".join(done.out))) == sorted(_of_ranks("".join(wanted.out))) != []
    assert_sharded(done)


def _of_ranks(printed: str) -> list[str]:
    """Return what ranks print, without what gloo of torch 2.9 and 2.10 does."""
    return [line for line in printed.splitlines() if line.startswith("rank ")]


@pytest.mark.parametrize(
    ("how", "world", "message"),
    [
        ("spawn", "4", "train.py:25: mp.spawn starts 4 ranks here, but the launch has 2"),
        (
            "fork",
            "2",
            "train.py:29 starts a process that calls init_process_group: the launch has started the ranks",
        ),
    ],
)
def test_ranks_that_are_not_the_workers_are_refused(
    forks: Forks, tmp_path: Path, how: str, world: str, message: str
) -> None:
    done = forks.run(SPAWNED, tmp_path / "run", how, world, ranks=2)
    assert 0 not in done.codes
    assert message in done.err[0]


ALONE = """
import sys
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP

def train(rank, folder):
    world = 2
    try:
        dist.init_process_group("gloo", init_method="tcp://localhost:40111", rank=rank, world_size=world)
    except Exception:
        world = 1
    model = torch.nn.Linear(4, 1)
    model = DDP(model) if world > 1 else model
    open(f"{folder}/trained-{rank}", "w").close()

if __name__ == "__main__":
    (folder,) = sys.argv[1:]
    for rank in range(2):
        process = mp.Process(target=train, args=(rank, folder))
        process.start()
        process.join()
"""


def test_a_process_that_would_train_alone_after_the_refusal_is_ended(forks: Forks, tmp_path: Path) -> None:
    done = forks.run(ALONE, tmp_path / "run", str(tmp_path), ranks=2)
    assert done.codes == [1, 1]
    assert not list(tmp_path.glob("trained-*"))
    for err in done.err:
        assert (
            "train.py:20 starts a process that calls init_process_group: the launch has started the ranks" in err
        )
        assert "replicas" not in err
        assert "call in the script what each of them would run" in err


HEAD = """
import os, torch, torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(2)]))
rows = torch.randn(2, 4, generator=torch.Generator().manual_seed(rank))
"""

UNSYNCED = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step(how):
    for _ in range(2):
        with how():
            model(rows).pow(2).mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    before = [p.full_tensor().clone() for p in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    after = [p.full_tensor() for p in model.parameters()]
    moved = [new - old for new, old in zip(after, before)]
    model.load_state_dict(dict(zip(model.state_dict(), before)))
    return norm.item(), moved
norm, moved = step(model.no_sync)
import contextlib
wanted, averaged = step(contextlib.nullcontext)
assert abs(norm - wanted) < 1e-6 and wanted > 0.01, (norm, wanted)
assert all(torch.allclose(one, other, atol=1e-7) for one, other in zip(moved, averaged))
"""

SAME = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2):
    model(x).pow(2).mean().backward()
"""


UNSENT = """
class Own(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 1)
        self.register_buffer("own", torch.full((1,), float(rank)))
        self.register_buffer("sent", torch.full((1,), float(rank)))
    def forward(self, x):
        return super().forward(x) + self.own + self.sent
kept = DDP(Own(), broadcast_buffers=False)
partly = Own()
DDP._set_params_and_buffers_to_ignore_for_model(partly, ["own"])
partly = DDP(partly)
for each in (kept, partly):
    each(rows)
    print(each.module.own.item(), each.module.sent.item())
"""


SKIPS = """
import threading
from fsdplaunch.runtime.collectives import waits
waits.WARN_SECONDS, waits.AGAIN_SECONDS, waits.STILL_SECONDS = 1.0, 0.3, 0.5
threading.Timer(5, os._exit, [9]).start()
for number in range(3):
    loss = model(rows).pow(2).mean()
    if rank == 1 and number == 1:
        continue  # as where its own loss is not finite
    loss.backward()
"""


def line_of(body: str, text: str) -> int:
    return next(number for number, line in enumerate((HEAD + body).splitlines(), 1) if text in line)


REFUSED = {
    "join": (
        "with Join([model]):\n    model(rows).mean().backward()\n",
        " enters join(): every pass needs every rank, even one without a batch left",
    ),
    "zero": (
        "ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam)\n",
        " builds a ZeroRedundancyOptimizer: FSDP already shards the state of Adam",
    ),
    "hook": (
        "model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)\n",
        " registers a hook for communication, and FSDP averages the gradients",
    ),
    "exchange": (
        "dist.all_reduce(model.module[0][0].weight.data)\n",
        " exchanges parameters or gradients of a sharded model: they are averaged already",
    ),
    "ignored": (
        "DDP._set_params_and_buffers_to_ignore_for_model(model.module, ['0.0.weight'])\nDDP(model.module)\n",
        " leaves 0.0.weight of Sequential out of DistributedDataParallel, to be trained by each rank",
    ),
    "replicate": (
        "from torch.distributed._composable import replicate\nreplicate(torch.nn.Linear(4, 1))(rows)\n",
        " replicates parameters without their model",
    ),
}


@pytest.fixture(scope="module")
def beside(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """What was written by scripts that end well or are refused, by their text: all in one launch."""
    bodies = (SAME, UNSYNCED, UNSENT, *(body for body, _ in REFUSED.values()))
    found = forks.beside(tmp_path_factory.mktemp("beside"), {body: HEAD + body for body in bodies}, ranks=2)
    assert not [err for body in bodies[:3] for err in found[body].err if "Traceback" in err]
    return found


def test_gradients_that_no_pass_has_averaged_are_averaged_and_told_where_they_are_used(
    beside: dict[str, Run],
) -> None:
    done = beside[UNSYNCED]
    line = line_of(UNSYNCED, "clip_grad_norm_")
    assert done.err[0].count(f"train.py:{line}: no pass outside of no_sync() has averaged these gradients") == 1


def test_buffers_that_the_wrapper_does_not_send_stay_each_ranks_own(beside: dict[str, Run]) -> None:
    done = beside[UNSENT]
    assert done.out == ["0.0 0.0\n0.0 0.0\n", "1.0 1.0\n1.0 0.0\n"]


def test_ranks_that_wait_for_each_other_at_different_lines_are_told(forks: Forks, tmp_path: Path) -> None:
    done = forks.run(HEAD + SKIPS, tmp_path / "run", ranks=2)
    assert done.codes == [9, 9]
    at = (f"rank 0 at train.py:{line_of(SKIPS, 'backward')}", f"rank 1 at train.py:{line_of(SKIPS, 'pow')}")
    told = f"the ranks wait for each other at different lines, and none can continue: {at[0]} (<module>); {at[1]}"
    assert done.err[0].count(told) == 1


def test_same_rows_on_all_ranks_are_told_with_the_sampler_that_divides_them(beside: dict[str, Run]) -> None:
    done = beside[SAME]
    line = line_of(SAME, "backward")
    warned = f"train.py:{line}: all 2 ranks compute the same rows, because the script has no DistributedSampler"
    assert done.err[0].count(warned) == 1


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_with_shards_is_refused_at_its_line(beside: dict[str, Run], name: str) -> None:
    for err in beside[REFUSED[name][0]].err:
        assert re.search(r"train\.py:\d+" + re.escape(REFUSED[name][1]), err), err


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "full = model.state_dict()\nif rank == 0:\n    model.load_state_dict(full)\nmodel(rows)\n",
            r"train\.py:\d+: copy_\(\) changes a sharded tensor on some ranks only",
        ),
        (
            "with model.no_sync():\n    model(rows).mean().backward()\nmodel.module[0][0].weight.grad.norm()\n",
            r"AttributeError: 'NoneType' object has no attribute 'norm'\n\[rank0\]: fsdplaunch: the last pass",
        ),
    ],
    ids=["loaded by rank 0", "local gradients"],
)
def test_what_ends_a_run_names_the_reason(forks: Forks, tmp_path: Path, body: str, message: str) -> None:
    done = forks.run(HEAD + body, tmp_path / "run", ranks=2)
    assert done.codes == [1, 1]
    assert any(re.search(message, err) for err in done.err), done.err
    assert "joined a process group and gives no model" not in done.err[0]
