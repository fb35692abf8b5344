"""A batch of as many rows as there are ranks: one row on each; and ranks that count nothing of theirs."""

from pathlib import Path

import pytest

from tests.scripts.conftest import RANKS, Forks, lines

LOSSES = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
X, Y = torch.randn(8 * RANKS, 6), torch.randint(0, 3, (8 * RANKS,))
def each(out, y): return F.cross_entropy(out, y, reduction="none")
losses = {
    "divergence": lambda out, x, y: F.kl_div(out.log_softmax(1), x[:, :3].softmax(1), reduction="batchmean"),
    "over rows": lambda out, x, y: out.pow(2).sum() / len(x),
    "by their inverse": lambda out, x, y: out.pow(2).sum() * (1 / len(x)),
    "two terms": lambda out, x, y: (out.pow(2).sum() - 0.3 * (1 + out).sum()) / x.size(0),
    "of one row each": lambda out, x, y: (out[:, 0].squeeze() - x[:, 0].squeeze()).pow(2).sum() / len(x),
    "squeezed": lambda out, x, y: F.mse_loss(out[:, 0].squeeze(), x[:, 0].squeeze()),
    "summed": lambda out, x, y: 0.01 * out.pow(2).sum(),
    "masked": lambda out, x, y: (each(out, y) * (y > 0)).sum() / (y > 0).sum().clamp(min=1),
    "masked number": lambda out, x, y: (each(out, y) * (y > 0).float()).sum() / max(int((y > 0).sum()), 1),
    "selected": lambda out, x, y: each(out, y)[y > 0].sum() / max(int((y > 0).sum()), 1),
    "where": lambda out, x, y: torch.where(y > 0, each(out, y), 0.0).sum() / max(int((y > 0).sum()), 1),
    "where not": lambda out, x, y: torch.where(y == 0, 0.0, each(out, y)).sum() / max(int((y > 0).sum()), 1),
    "filled": lambda out, x, y: each(out, y).masked_fill(y == 0, 0.0).sum() / (y > 0).sum().clamp(1),
    "ignored": lambda out, x, y: F.cross_entropy(out, y, reduction="sum", ignore_index=0) / (y > 0).sum().clamp(1),
    "accumulated": lambda out, x, y: (each(out, y) * (y > 0)).sum() / max(int((y > 0).sum()), 1) / 1,
}
for number, (name, loss_of) in enumerate(losses.items(), 1):
    torch.manual_seed(1)
    model = nn.Linear(6, 3).to("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x, y in DataLoader(TensorDataset(X, Y), batch_size=ROWS * RANKS):
        loss = loss_of(model(x), x, y)
        optimizer.zero_grad()
        exec(compile("\\n" * number + "loss.backward()", "losses.py", "exec"))
        optimizer.step()
    print(f"{name}: {loss.item():.6f} {model(X).detach().square().sum().item():.6f}")
"""


@pytest.mark.parametrize("rows", [1, 2])
def test_losses_over_few_rows_are_those_of_one_process(forks: Forks, tmp_path: Path, rows: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOSSES.replace("RANKS", str(RANKS)).replace("ROWS", str(rows)))
    plain = forks.run(script, tmp_path / "plain")
    many = forks.run(script, tmp_path / "many", ranks=RANKS, launch__keep_global_batch=True)
    assert many.codes == [0] * RANKS, many.err
    expected = lines(plain.out[0])
    assert len(expected) == LOSSES.count("lambda"), plain.err
    for name, numbers in lines(many.out[0]).items():
        assert numbers == pytest.approx(expected[name], abs=1e-5), name


OUTSIDE = """
import torch
from torch import nn
from torch.utils.data import DataLoader
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(8, 4), nn.Linear(4, 1)
    def forward(self, x):
        return self.head(self.table(x))
model = Net().to("cpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in DataLoader(torch.arange(8), batch_size=RANKS):
    loss = model(x).mean() + model.table(x).norm(dim=1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.6f}")
"""


def test_part_of_a_model_is_called_beside_it(forks: Forks, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(OUTSIDE.replace("RANKS", str(RANKS)))
    plain = forks.run(script, tmp_path / "plain")
    many = forks.run(script, tmp_path / "many", ranks=RANKS, launch__keep_global_batch=True)
    assert many.codes == [0] * RANKS, many.err
    assert many.losses() == pytest.approx(plain.losses(), abs=1e-5)


ANSWERS = """
import torch
from torch import nn
from torch.utils.data import DataLoader
torch.manual_seed(0)
model = nn.Linear(5, 4).to("cpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in DataLoader(torch.randn(16, 5), batch_size=4 * RANKS):
    several = x.repeat_interleave(3, 0)
    with torch.no_grad():
        drawn = torch.multinomial(model(several).softmax(1), 2)
    loss = -(model(several).log_softmax(1).gather(1, drawn).sum(1)).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.6f}")
"""


def test_several_answers_to_each_row_are_drawn_as_one_process_draws_them(forks: Forks, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ANSWERS.replace("RANKS", str(RANKS)))
    plain = forks.run(script, tmp_path / "plain")
    many = forks.run(script, tmp_path / "many", ranks=RANKS, launch__keep_global_batch=True)
    assert many.codes == [0] * RANKS, many.err
    assert many.losses() == pytest.approx(plain.losses(), abs=1e-5)
