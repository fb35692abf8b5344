"""Rank 0 saves alone wherever other ranks are: files are whole and of one step; what cannot be is an error."""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.scripts.conftest import Forks, Run

HEAD = """
import copy, os, random, signal, sys, threading, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from safetensors.torch import load_file, save_file, save_model
dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
torch.manual_seed(0)
random.seed(rank)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        wide = 2048  # large enough to be gathered when it is written
        blocks = [nn.Sequential(nn.Linear(8, wide), nn.Tanh(), nn.Linear(wide, 8)) for _ in range(3)]
        self.layers = nn.Sequential(*blocks)
        self.register_buffer("steps", torch.zeros(()))
    def forward(self, x):
        return self.layers(x)
model = DDP(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
def step():
    with torch.no_grad():
        model.module.steps += 1
    time.sleep(random.choice([0, 0, 0.03]))
    model(torch.randn(4, 8)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

PROBE = (
    """
import os, torch
from torch.nn.parallel import DistributedDataParallel
own = torch.nn.Linear(8, 1)
probe = torch.optim.SGD(own.parameters(), lr=0.1) if os.environ["RANK"] == "0" else None
"""
    + HEAD
    + """
for number in range(4):
    step()
    if rank == 0:
        own(torch.ones(2, 8)).pow(2).mean().backward()
        probe.step()
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
dist.barrier()
"""
)

EVERYWHERE = """
ema = copy.deepcopy(model.module)
shadow = {name: value.detach().clone() for name, value in model.module.named_parameters()}
def norm_of(tensor):
    return tensor.norm().item()
for number in range(12):
    step()
    for name, now in model.module.named_parameters():
        shadow[name].lerp_(now.detach(), 0.5)
    if number == 3 and rank == 0:
        best = copy.deepcopy(model.state_dict())
    if number == 3:
        of_best = {name: value.full_tensor() for name, value in model.named_parameters()}
    together = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with torch.no_grad():
        for mean, now in zip(ema.parameters(), model.module.parameters()):
            mean.lerp_(now, 0.5)
    if rank == 0 and number % 3 == 2:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"all-{number}.pt")
        torch.save({k: v.cpu().clone() for k, v in model.module.state_dict().items()}, f"copied-{number}.pt")
        torch.save({k: v.detach().to(torch.float64) for k, v in ema.state_dict().items()}, f"ema-{number}.pt")
        save_file(model.module.state_dict(), f"file-{number}.safetensors")
        save_model(model.module, f"model-{number}.safetensors")
    if rank == 0 and number == 8:
        torch.save({"best": best, **together}, "kept.pt")
        torch.save(model, "wrapper.pt")
        thread = threading.Thread(target=torch.save, args=(model.module.state_dict(), "threaded.pt"))
        thread.start()
        thread.join()
        try:
            torch.save(shadow, "never.pt")
        except RuntimeError as error:
            print("refused:", "is neither a current parameter nor current optimizer state" in str(error))
    if rank == 0 and number == 11:
        first = model.module.layers[0][0]
        read = [first.bias.tolist(), first.weight.detach().cpu().numpy(), first.weight.norm().item()]
        read += [f"{first.bias.sum():.6f}", norm_of(first.weight)]
    if number == 5:
        dist.barrier()
    full = {name: value.full_tensor() for name, value in model.module.named_parameters()}
    means = {name: value.full_tensor() for name, value in ema.named_parameters()}
    norm = norm_of(model.module.layers[0][0].weight)  # by all, at a line at which rank 0 is alone as well
    if rank == 0 and number % 3 == 2:
        saved = torch.load(f"all-{number}.pt")
        copied, file = torch.load(f"copied-{number}.pt"), load_file(f"file-{number}.safetensors")
        averaged = torch.load(f"ema-{number}.pt")
        module = load_file(f"model-{number}.safetensors")
        assert int(saved["model"]["module.steps"]) == number + 1
        assert all(state["step"] == number + 1 for state in saved["optimizer"]["state"].values())
        for name, value in full.items():
            for found in (saved["model"]["module." + name], copied[name], file[name], module[name]):
                assert type(found) is torch.Tensor and torch.equal(found, value), name
            assert averaged[name].dtype is torch.float64 and torch.equal(averaged[name].float(), means[name])
        print("compared", number)
    if rank == 0 and number == 11:
        weight, bias = full["layers.0.0.weight"], full["layers.0.0.bias"]
        assert read[0] == bias.tolist() and torch.equal(torch.from_numpy(read[1]), weight)
        assert abs(read[2] - weight.norm().item()) < 1e-5 and read[3] == f"{bias.sum():.6f}"
        assert abs(read[4] - norm) < 1e-5
        print("read alone")
    if rank == 0 and number == 8:
        kept, threaded = torch.load("kept.pt"), torch.load("threaded.pt")
        assert all(torch.equal(kept["best"][name], value) for name, value in of_best.items())
        assert all(torch.equal(kept["model"]["module." + name], value) for name, value in full.items())
        assert all(value["exp_avg"].ndim for value in kept["optimizer"]["state"].values())
        assert all(torch.equal(threaded[name], value) for name, value in full.items())
dist.destroy_process_group()
if rank == 0:
    time.sleep(0.3)
    torch.save(optimizer.state_dict(), "last.pt")
    print("saved after the end")
"""

ALL_RANKS = """
step()
torch.save(model.state_dict(), "together.pt")
torch.save({"rank": rank}, f"own-{rank}.pt")
print(sorted(os.listdir("."))[-1])
"""

KILLED = """
step()
if rank == 1:
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
torch.save(model.state_dict(), "never.pt")
"""

TRAINED_ALONE = """
step()
model.eval()
with torch.no_grad():
    model(torch.randn(4, 8))
if rank == 0:
    model.train()
    print(model(torch.randn(4, 8)).sum())
step()
"""

SWAPPED = """
step()
kept = {name: value.detach().clone() for name, value in model.module.named_parameters()}
with torch.no_grad():
    for value in model.module.parameters():
        value.mul_(0.5)
halves = {name: value.full_tensor() for name, value in model.named_parameters()}
if rank == 0:
    torch.save(model.state_dict(), "halves.pt")
    saved = torch.load("halves.pt")
    print(all(torch.equal(saved[name], value) for name, value in halves.items()))
with torch.no_grad():
    for name, value in model.module.named_parameters():
        value.copy_(kept[name])
step()
"""

UNKNOWN = """
step()
best = {name: value.clone() for name, value in model.state_dict().items()}
step()
if rank == 0:
    torch.save(best, "never.pt")
step()
"""


def run(forks: Forks, folder: Path, body: str) -> tuple[Run, float, Path]:
    script = folder / "train.py"
    script.write_text(HEAD + body)
    began = time.monotonic()
    done = forks.run(script, folder / "run", ranks=2, timeout=60)
    return done, time.monotonic() - began, script


def test_every_file_that_rank_0_saves_is_whole_and_of_one_step(
    forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = forks.passes(HEAD + EVERYWHERE, tmp_path / "run", ranks=2, timeout=60)
    said = [*(f"compared {n}" for n in (2, 5)), "refused: True", *(f"compared {n}" for n in (8, 11)), "read alone"]
    assert done.out[0].splitlines() == [*said, "saved after the end"]
    assert not (done.folder / "never.pt").exists()
    monkeypatch.setattr("__main__.Net", type("Net", (nn.Module,), {}), raising=False)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapper = torch.load(done.folder / "wrapper.pt", weights_only=False)
    finally:
        dist.destroy_process_group()
    assert isinstance(wrapper, DistributedDataParallel)
    assert wrapper.module.layers[2][2].weight.shape == (8, 2048)
    last = torch.load(done.folder / "last.pt")
    assert all(state["exp_avg"].numel() in (8, 2048, 2048 * 8) for state in last["state"].values())
    assert load_file(done.folder / "file-11.safetensors")["layers.0.0.weight"].shape == (2048, 8)


def test_an_optimizer_of_rank_0s_own_is_no_step_of_the_model(forks: Forks, tmp_path: Path) -> None:
    done = forks.passes(PROBE, tmp_path / "run", ranks=2, timeout=60)
    state = torch.load(done.folder / "last.pt")
    assert state["model"]["layers.0.0.weight"].shape == (2048, 8)
    assert state["optimizer"]["state"][0]["exp_avg"].shape == (2048, 8)


def test_save_by_all_ranks_is_written_once_and_own_files_by_each(forks: Forks, tmp_path: Path) -> None:
    done = forks.passes(HEAD + ALL_RANKS, tmp_path / "run", ranks=2, timeout=60)
    assert sorted(path.name for path in done.folder.iterdir()) == ["own-0.pt", "own-1.pt", "together.pt"]
    assert torch.load(done.folder / "own-1.pt") == {"rank": 1}


def test_killed_rank_ends_the_save_within_seconds(forks: Forks, tmp_path: Path) -> None:
    done, seconds, _ = run(forks, tmp_path, KILLED)
    assert done.codes == [1, -9], done.err
    assert "rank 1 ended while rank 0 was saving a tensor of which it holds a shard" in done.err[0]
    assert not (done.folder / "never.pt").exists()
    assert seconds < 30


@pytest.mark.parametrize(
    ("body", "line", "says"),
    [
        (TRAINED_ALONE, "print(model(", "calls Net in training on rank 0 only: rank 1 is at train.py:"),
        (UNKNOWN, "torch.save(best", "is neither a current parameter nor current optimizer state"),
    ],
    ids=["training", "unknown copy"],
)
def test_what_rank_0_cannot_do_alone_is_an_error_at_its_line(
    forks: Forks, tmp_path: Path, body: str, line: str, says: str
) -> None:
    done, seconds, script = run(forks, tmp_path, body)
    number = next(n for n, text in enumerate(script.read_text().splitlines(), 1) if line in text)
    assert done.codes[0] == 1, done.err
    assert says in done.err[0]
    assert f"train.py:{number} " in done.err[0]
    assert "hint: " in done.err[0]
    assert not (done.folder / "never.pt").exists()
    assert seconds < 30


def test_weights_that_all_ranks_exchange_for_a_save_by_rank_0_are_saved_or_it_is_an_error(
    forks: Forks, tmp_path: Path
) -> None:
    done, seconds, script = run(forks, tmp_path, SWAPPED)
    assert seconds < 30
    if done.codes[0]:  # the other rank had changed them back
        number = next(n for n, text in enumerate(script.read_text().splitlines(), 1) if '"halves.pt")' in text)
        assert "on rank 0 only, and weights were changed on rank 1 since" in done.err[0]
        assert f"train.py:{number} " in done.err[0]
        assert not (done.folder / "halves.pt").exists()
    else:
        assert done.out[0] == "True\n"


AHEAD = """
class Done:
    def wait(self, *_):
        return True
    def is_completed(self):
        return True
def return_at_once(*_, async_op=False, **__):  # as NCCL's do to the host; the device's time line is not here
    return Done() if async_op else None
for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_gather_single", "reduce_scatter_single"):
    setattr(dist, name, return_at_once)
model = DDP(Net(), broadcast_buffers=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for epoch in range(4):
    for batch in range(4):
        while rank and epoch and batch == 1 and not os.path.exists(f"saved-{epoch - 1}"):
            time.sleep(0.01)  # as the next copy to the device, which waits for the stream
        step()
    if rank == 0:
        time.sleep(0.2)
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, f"{epoch}.pt")
        torch.save(int(model.module.steps), f"saved-{epoch}")
"""


def test_rank_0_saves_where_the_hosts_of_the_others_run_on_through_the_next_step(
    forks: Forks, tmp_path: Path
) -> None:
    done = forks.passes(HEAD + AHEAD, tmp_path / "run", ranks=2, timeout=60)
    for epoch in range(4):
        saved = torch.load(done.folder / f"{epoch}.pt")
        assert saved["model"]["layers.0.0.weight"].shape == (2048, 8)
        assert {float(state["step"]) for state in saved["optimizer"]["state"].values()} == {4.0 * (epoch + 1)}
        assert float(saved["model"]["steps"]) == 4.0 * (epoch + 1)


READING_LIBRARY = """
import torch
def train(model, alone):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(2):
        model(torch.ones(4, 8)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(model.weight.norm().item())
    if alone:
        found.append(max(float(value.norm()) for value in model.state_dict().values()))
    return found
"""

READS = """
import os, sys
import torch
sys.path.insert(0, sys.argv[1])
import library
torch.manual_seed(0)
model = torch.nn.Linear(8, 3).to("cpu")
print(*(f"{value:.5f}" for value in library.train(model, os.environ.get("RANK", "0") == "0")))
"""


def test_rank_0_reads_alone_where_a_library_has_read_with_all_ranks_before(forks: Forks, tmp_path: Path) -> None:
    script, packages = tmp_path / "train.py", tmp_path / "site-packages"
    packages.mkdir()
    (packages / "library.py").write_text(READING_LIBRARY)
    script.write_text(READS)
    plain = forks.run(script, tmp_path / "plain", str(packages))
    done = forks.passes(script, tmp_path / "run", str(packages), ranks=2, timeout=60)
    assert done.out[0] == plain.out[0]
    assert plain.out[0].startswith(done.out[1].strip())
