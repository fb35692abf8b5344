"""Models that are sharded keep what their scripts rely on: attributes of parameters, own `parameters()`."""

from pathlib import Path

import pytest

from tests.scripts.conftest import Forks

HEAD = """
import copy, sys, torch
from torch import nn
torch.manual_seed(0)
"""

TAGGED = """
model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(2)], nn.Linear(8, 1))
for name, p in model.named_parameters():
    p.tag = name
    if p.dim() < 2:
        p._no_weight_decay = True
given(model)
assert [p.tag for p in model.parameters()] == [name for name, _ in model.named_parameters()]
decayed = [p for p in model.parameters() if not getattr(p, "_no_weight_decay", False)]
optimizer = torch.optim.AdamW([
    {"params": decayed, "weight_decay": 0.5},
    {"params": [p for p in model.parameters() if hasattr(p, "_no_weight_decay")], "weight_decay": 0.0},
], lr=0.01)
print([len(group["params"]) for group in optimizer.param_groups])
for _ in range(3):
    optimizer.zero_grad()
    loss = model(torch.ones(4, 8)).pow(2).mean()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.5f}", [p.tag for p in optimizer.param_groups[1]["params"]])
model.to(torch.float64)
print(all(hasattr(p, "tag") for p in model.parameters()))
"""

LISTED = """
class Learner(nn.Module):  # as in implementations of MAML
    def __init__(self):
        super().__init__()
        self.vars = nn.ParameterList([nn.Parameter(torch.randn(8, 8) / 4), nn.Parameter(torch.zeros(8))])
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(8, 1)
    def forward(self, x):
        return self.head(self.blocks(nn.functional.linear(x, self.vars[0], self.vars[1])))
    def parameters(self):
        return list(self.vars)
model = Learner()
given(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    loss = model(torch.ones(4, 8)).pow(2).mean()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.5f}", len(model.parameters()))
averaged = copy.deepcopy(model)
with torch.no_grad():
    print(f"{averaged(torch.ones(4, 8)).sum().item():.5f}")
"""

GIVEN = {
    "moved": "def given(model): model.to('cpu')\n",
    "prepared": "import fsdplaunch\ndef given(model): fsdplaunch.prepare(model) if len(sys.argv) > 1 else None\n",
}


@pytest.mark.parametrize(
    ("given", "body"), [("prepared", TAGGED), ("moved", LISTED)], ids=["attributes", "own parameters()"]
)
def test_what_a_script_put_on_its_model_survives_sharding(
    forks: Forks, tmp_path: Path, given: str, body: str
) -> None:
    plain = forks.run(HEAD + GIVEN[given] + body, tmp_path / "plain")
    many = forks.run(HEAD + GIVEN[given] + body, tmp_path / "many", "prepare", ranks=2)
    assert plain.codes + many.codes == [0, 0, 0], plain.err + many.err
    assert many.out == plain.out * 2


WIDE = """
class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)])
        self.wide = nn.Linear(4, 99)
    def forward(self, x):
        return self.wide(self.blocks(x))
model = Wide()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2, 4)).mean().backward()
optimizer.step()
"""


SEVERAL = """
nets = [nn.Linear(4, 4) for _ in range(4)] + [nn.Sequential(nn.Linear(4, 4), nn.ReLU())]
optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
for net, optimizer in zip(nets, optimizers):
    net(torch.ones(2, 4)).mean().backward()
    optimizer.step()
"""


def test_a_model_mostly_in_no_block_is_one_unit_and_small_models_are_named_in_one_line(
    forks: Forks, tmp_path: Path
) -> None:
    run = forks.beside(tmp_path, {"wide": HEAD + WIDE, "several": HEAD + SEVERAL})
    assert "sharded Wide: one unit, 535 parameters" in run["wide"].err[0]
    named = [line for line in run["several"].err[0].splitlines() if "sharded" in line]
    assert len(named) == 1
    assert "sharded 5 models: 4 x Linear, Sequential, 100 parameters, FSDP2 FULL_SHARD over 2 ranks" in named[0]
