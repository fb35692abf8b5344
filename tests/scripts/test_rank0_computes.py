"""Rank 0 alone computes with shards and keeps copies; threads save; ranks that save a file each get their file."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.scripts.conftest import Forks

HEAD = """
import copy, os, sys, threading, time
import numpy, torch, torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from safetensors.torch import save_file
dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

def step():
    optimizer.zero_grad()
    model(torch.randn(4, 8)).pow(2).mean().backward()
    optimizer.step()

def full_state():
    return {name: torch.tensor(value.tolist()) for name, value in model.module.named_parameters()}
"""

COMPUTES = (
    HEAD
    + """
COMPUTED = {
    "row": lambda w: w[0],
    "rows": lambda w: w[:2].sum(),
    "element": lambda w: w.flatten()[3],
    "elements": lambda w: w.view(-1)[:5],
    "some rows": lambda w: w[[0, 2]],
    "masked": lambda w: w[w > 0],
    "square transposed": lambda w: w.t()[0],
    "transposed": lambda w: w.detach().t().numpy(),
    "where largest": lambda w: w.argmax(),
    "largest": lambda w: w.topk(2).values,
    "sorted": lambda w: w.sort().values,
    "median": lambda w: w.median(),
    "row norms": lambda w: w.norm(dim=1).max(),
    "histogram": lambda w: torch.histc(w.detach(), 5),
    "quantile": lambda w: torch.quantile(w.detach(), 0.5),
    "unique": lambda w: w.unique(),
    "size": lambda w: w.abs().mean(),
    "zeros": lambda w: (w == 0).sum(),
    "small": lambda w: (w.abs() < 0.1).float().mean(),
    "numbers": lambda w: torch.isfinite(w).all(),
    "energy": lambda w: (w**2).sum(),
    "similarity": lambda w: torch.cosine_similarity(w[0], w[1], dim=0),
    "together": lambda w: torch.cat([w.reshape(-1), w.flatten()]).mean(),
    "product": lambda w: w.t() @ w,
    "linear": lambda w: F.linear(torch.ones(1, 8), w),
    "softmax": lambda w: F.softmax(w, dim=0),
    "trace": lambda w: torch.trace(w),
    "equal": lambda w: torch.tensor(torch.equal(w, w)),
    "close": lambda w: torch.tensor(torch.allclose(w, w.clone())),
    "cut": lambda w: w.chunk(2)[1],
    "cut unequally": lambda w: w.split(3)[1],
    "made like it": lambda w: w.new_ones(w.shape) + torch.zeros_like(w) + w,
    "vector": lambda w: nn.utils.parameters_to_vector([w]),
    "array": lambda w: numpy.asarray(w.detach()),
    "iterated": lambda w: torch.stack([row.sum() for row in w]),
}

def plain(value):
    return torch.tensor(value.tolist())

for _ in range(2):
    step()
weight, alone = model.module[0].weight, rank == 0 and sys.argv[1] == "alone"
if alone:
    found = {name: plain(compute(weight)) for name, compute in COMPUTED.items()}
    with torch.inference_mode():
        inferred = {name: plain(compute(weight)) for name, compute in COMPUTED.items()}
    moments = optimizer.state[weight]
    ratio = (moments["exp_avg"] / moments["exp_avg_sq"].sqrt()).norm()
    for name, compute in {"norm": lambda p: p.grad.norm(), "row": lambda p: p.grad[0]}.items():
        try:
            compute(weight)
        except RuntimeError as error:
            print("refused", name, "neither a current parameter" in str(error), "reading a gradient" in error.hint)
before = {name: torch.tensor(value.tolist()) for name, value in optimizer.state[weight].items() if value.dim()}
before |= {name: value.detach() for name, value in full_state().items()}
for _ in range(2):
    step()
full = full_state()
if alone:
    for name, compute in COMPUTED.items():
        expected = plain(compute(before["0.weight"]))
        assert torch.equal(found[name], expected) and torch.equal(inferred[name], expected), name
    assert torch.equal(ratio, (before["exp_avg"] / before["exp_avg_sq"].sqrt()).norm())
    print("compared")
if rank == 0:
    torch.save(full, f"{sys.argv[1]}.pt")
"""
)


def test_rank_0_alone_computes_what_the_full_tensor_gives_and_training_goes_on(
    forks: Forks, tmp_path: Path
) -> None:
    refused = ["refused norm True True", "refused row True True"]
    for way, said in (("together", []), ("alone", [*refused, "compared"])):
        done = forks.passes(COMPUTES, tmp_path / "run", way, ranks=2, timeout=60)
        assert done.out[0].splitlines() == said
    together, alone = (torch.load(tmp_path / "run" / f"{way}.pt") for way in ("together", "alone"))
    assert all(torch.equal(together[name], value) for name, value in alone.items())


KEPT = (
    HEAD
    + """
threads = []
for number in range(4):
    step()
    before = full_state()
    state = {name: value.clone() for name, value in optimizer.state[model.module[0].weight].items()}
    moment = torch.tensor(state["exp_avg"].tolist())
    if rank == 0:
        now = model.module.state_dict()
        if number == 0:
            average, expected = {name: value.clone() for name, value in now.items()}, dict(before)
        average = {name: 0.5 * average[name].mul_(0.5).add_(value, alpha=0.5) for name, value in now.items()}
        expected = {name: 0.25 * expected[name] + 0.25 * value for name, value in before.items()}
        if number == 1:
            kept = {name: value.cpu().clone() for name, value in now.items()}
            kept_state = copy.deepcopy(optimizer.state_dict())
            best, best_moment = before, moment
        halves = {name: value.detach().half() for name, value in now.items()}
        threads.append(threading.Thread(target=torch.save, args=(halves, f"half-{number}.pt")))
        threads[-1].start()
        torch.save([halves, average], f"both-{number}.pt")
        for name, value in before.items():
            torch.testing.assert_close(average[name], expected[name], msg=name)
            assert torch.equal(torch.load(f"both-{number}.pt")[0][name], value.half()), name

if rank == 0:
    torch.save({"best": kept, "optimizer": kept_state}, "best.pt")
    saved = torch.load("best.pt")
    assert all(torch.equal(saved["best"][name], value) for name, value in best.items())
    assert torch.equal(saved["optimizer"]["state"][0]["exp_avg"], best_moment)
    for number, thread in enumerate(threads):
        thread.join()
        assert all(type(value) is torch.Tensor for value in torch.load(f"half-{number}.pt").values())
    state = model.module.state_dict()
    saves = [(torch.save, (state, f"at-once-{number}.pt")) for number in range(3)]
    saves += [(torch.save, (optimizer.state_dict(), "optimizer.pt")), (save_file, (state, "file.safetensors"))]
    threads = [threading.Thread(target=save, args=args) for save, args in saves]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
step()
if rank == 0:
    torch.save(before, "expected.pt")
"""
)


def test_rank_0_alone_keeps_copies_and_its_threads_save_them_and_shards(forks: Forks, tmp_path: Path) -> None:
    folder = forks.passes(KEPT, tmp_path / "run", ranks=2, timeout=60).folder
    expected = torch.load(folder / "expected.pt")
    files = [*(torch.load(folder / f"at-once-{number}.pt") for number in range(3))]
    for saved in (*files, load_file(folder / "file.safetensors")):
        assert all(torch.equal(saved[name], value) for name, value in expected.items())
    assert torch.load(folder / "optimizer.pt")["state"][0]["exp_avg"].shape == (8, 8)


EACH = (
    HEAD
    + """
step()
state = model.module.state_dict()
torch.save({"rank": rank, "model": state}, f"state-00{rank}-of-002.pt")
save_file(state, f"r{rank}.safetensors")
os.makedirs(f"d{rank}", exist_ok=True)
torch.save(model.module, f"d{rank}/whole.pt")
torch.save(state, f"{rank}.part")
os.replace(f"{rank}.part", f"moved{rank}.pt")
torch.save(state, "same.pt")
"""
)


def test_each_rank_of_a_script_that_saves_a_file_per_rank_writes_its_own(forks: Forks, tmp_path: Path) -> None:
    folder = forks.passes(EACH, tmp_path / "run", ranks=2, timeout=60).folder
    expected = torch.load(folder / "same.pt")
    for rank in range(2):
        saved = torch.load(folder / f"state-00{rank}-of-002.pt")
        assert saved["rank"] == rank
        whole = torch.load(folder / f"d{rank}" / "whole.pt", weights_only=False).state_dict()
        moved, file = torch.load(folder / f"moved{rank}.pt"), load_file(folder / f"r{rank}.safetensors")
        for found in (saved["model"], whole, moved, file):
            assert all(torch.equal(found[name], value) for name, value in expected.items())
    names = {"same.pt", *(f"{name}{rank}{end}" for rank in range(2) for name, end in NAMES)}
    assert {path.name for path in folder.iterdir()} == names


NAMES = (("state-00", "-of-002.pt"), ("r", ".safetensors"), ("d", ""), ("moved", ".pt"))

GRADIENT = """
if rank == 0:
    model(torch.randn(4, 8)).pow(2).mean().backward()
    print(model.module[0].weight.grad.norm())
else:
    step()
"""
THREAD = """
from fsdplaunch.runtime.state_dict import gather
gather.PATIENCE_SECONDS = 0.3
state = model.module.state_dict()
thread = threading.Thread(target=lambda: print(sum(each.abs().sum() for each in tuple(state.values()))))
if rank == 0:
    thread.start()
for _ in range(500):
    step()
    time.sleep(0.01)
"""
QUEUE = "import contextlib, queue\n" + THREAD.replace(  # where a main thread that trains may wait as well
    "    time.sleep(0.01)", "    with contextlib.suppress(queue.Empty):\n        queue.Queue().get(timeout=0.5)"
)
STATE = THREAD.replace("state.values()", "model.module.state_dict().values()")
SEVERAL = """
threads = [threading.Thread(target=torch.save, args=(model.state_dict(), f"{n}.pt")) for n in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
step()
"""


@pytest.mark.parametrize(
    ("body", "says", "hint"),
    [
        (GRADIENT, "is neither a current parameter nor", "have every rank make this call"),
        (THREAD, "gathers shards in another thread, while the main thread goes on", "join the thread"),
        (QUEUE, "gathers shards in another thread, while the main thread goes on", "join the thread"),
        (STATE, "state_dict() at train.py:", "copy what it writes before it starts"),
        (SEVERAL, "on all ranks in several threads at once", "save on rank 0 alone"),
    ],
    ids=["gradient", "thread of rank 0", "thread beside a queue", "state in a thread", "threads at once"],
)
def test_what_cannot_be_gathered_ends_the_run_with_what_to_do(
    forks: Forks, tmp_path: Path, body: str, says: str, hint: str
) -> None:
    done = forks.run(HEAD + "step()\n" + body, tmp_path / "run", ranks=2, timeout=60)
    assert 1 in done.codes, done.err
    failed = next((text for text in done.err if says in text), "")  # another rank may fail by its end
    assert hint in failed, done.err
