"""Rank 0 alone calls a sharded model without training it: it gets what all ranks get, and training goes on."""

from pathlib import Path

import pytest
import torch

from tests.scripts.conftest import Forks

SCRIPT = """
import os
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
torch.manual_seed(0)
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.last, self.drop = nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(0.3)
    def forward(self, x):
        return x + self.drop(self.last(self.norm(x)).tanh())
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.scale = nn.Embedding(11, 8), nn.BatchNorm1d(8)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.words.weight
    def forward(self, x):
        h = self.scale(self.words(x).flatten(0, 1)).view(*x.shape, 8)
        for block in self.blocks:
            h = block(h)
        return self.head(h)
    @torch.no_grad()
    def generate(self, x, number):
        for _ in range(number):
            x = torch.cat([x, self(x)[:, -1:].argmax(-1)], 1)
        return x
net = Net()
model = DDP(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
rows = torch.randint(0, 11, (3, 4, 6), generator=torch.Generator().manual_seed(5))
def evaluated(called):
    called.eval()
    with torch.no_grad():
        found = [called(x) for x in rows]
    called.train()
    return torch.stack(found)
def with_graph():
    net.eval()
    found = [net(x) for x in rows]
    net.train()
    return torch.stack(found).detach()
@torch.no_grad()
def in_training():
    torch.manual_seed(3)
    found = [net(x) for x in rows] + [value.clone().float() for value in net.buffers()]
    return torch.cat([each.flatten() for each in found])
@torch.no_grad()
def part():
    return net.head(torch.ones(2, 8, dtype=torch.bfloat16 if LOW else torch.float32))
@torch.inference_mode()
def inferred():
    net.eval()
    found = net(rows[0])
    net.train()
    return found.clone()
CALLS = {
    "in inference mode": inferred,
    "by the wrapper": lambda: evaluated(model),
    "the model": lambda: evaluated(net),
    "with a graph": with_graph,
    "in training": in_training,
    "a method": lambda: net.generate(rows[0][:1], 3).float(),
    "a part": part,
}
@torch.no_grad()
def result(name):
    kept = {name: value.clone() for name, value in net.named_buffers()}
    with torch.enable_grad():
        found = CALLS[name]()
    for name, value in net.named_buffers():
        value.copy_(kept[name])
    return found
stream = torch.Generator().manual_seed(7 + rank)
def step():
    x = torch.randint(0, 11, (4, 6), generator=stream)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x[:, :-1]).flatten(0, 1).float(), x[:, 1:].flatten()).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
for number in range(3):
    alone = {}
    if rank == 0 and ALONE:
        alone = {name: result(name) for name in CALLS}
        assert torch.equal(result("the model"), alone["the model"])
    if ALONE:
        together = {name: result(name) for name in CALLS}
        for name, found in alone.items():
            print(number, name, torch.equal(found, together[name]), len(found.unique()) > 1)
    torch.manual_seed(number)
    step()
if rank == 0:
    torch.save(net.state_dict(), "end.pt")
"""


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_rank_0_alone_evaluates_as_all_ranks_do(forks: Forks, tmp_path: Path, precision: str) -> None:
    text = SCRIPT.replace("LOW", str(precision != "no"))
    keys = {"timeout": 120, "mixed_precision": precision}
    done = forks.passes(text.replace("ALONE", "True"), tmp_path / "alone", ranks=2, **keys)
    names = (
        "in inference mode",
        "by the wrapper",
        "the model",
        "with a graph",
        "in training",
        "a method",
        "a part",
    )
    lines = [f"{number} {name} True True" for number in range(3) for name in names]
    assert done.out[0].splitlines() == lines
    assert done.out[1] == ""
    line = next(n for n, text in enumerate(SCRIPT.splitlines(), 1) if "found = net(rows[0])" in text)
    told = f"train.py:{line}: rank 0 alone calls Net: it gets the full parameters"
    assert done.err[0].count(told) == 1, done.err[0]
    if precision == "no":
        state = torch.load(done.folder / "end.pt")
        together = forks.passes(text.replace("ALONE", "False"), tmp_path / "together", ranks=2, **keys)
        for name, value in torch.load(together.folder / "end.pt").items():
            assert torch.equal(state[name], value), name


COMPILED = """
import os
import torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
torch.manual_seed(0)
net = torch.compile(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), backend="eager")
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
def evaluate():
    model.eval()
    with torch.no_grad():
        found = model(torch.ones(3, 4))
    model.train()
    return found
for number in range(2):
    alone = evaluate() if dist.get_rank() == 0 else None
    together = evaluate()
    if alone is not None:
        print(number, torch.allclose(alone, together))
    model(torch.randn(2, 4)).pow(2).mean().backward()
    optimizer.step()
if dist.get_rank() == 0:
    net.eval()
    net(torch.ones(3, 4))
"""


def test_rank_0_alone_evaluates_a_compiled_model_by_its_wrapper_only(forks: Forks, tmp_path: Path) -> None:
    done = forks.run(COMPILED, tmp_path / "run", ranks=2, timeout=120)
    assert done.out[0] == "0 True\n1 True\n", done.err
    line = COMPILED.count("\n")
    assert done.codes[0] == 1
    assert f"train.py:{line} calls Sequential in evaluation on rank 0 only" in done.err[0]
    assert "that is not compiled" in done.err[0]
