"""What a script computes of its batch's rows beside the loss's graph is told with its line."""

from pathlib import Path

from tests.scripts.conftest import RANKS, Forks

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
data = TensorDataset(torch.arange(32), torch.randn(32, 5))
model = nn.Linear(5, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
bank, queue, slots, alike = torch.zeros(32, 3), torch.ones(6, 3), torch.zeros(3, 12), torch.randn(4, 3)
table, log = torch.zeros(32, 3), []
for index, x in DataLoader(data, batch_size=4 * RANKS, shuffle=True):
    out = model(x)
    losses = out.pow(2).sum(1)
    hardest = losses.topk(2).values  # ranked
    keep = losses.detach() <= losses.detach().median()  # ranked
    order = out[:, 0].argsort()  # ranked
    scores = out.detach().mean(1)
    scores = (scores - scores.mean()) / scores.std()  # spread
    center = x.var(0)  # spread
    with torch.no_grad():
        bank[index] = out  # written
        slots[:, 3:7] = out.t()  # written
        table.index_copy_(0, index, out)  # written
        queue = torch.cat([out, queue])[:6]  # joined
    log.append((losses.detach().quantile(0.9).item(), float(losses.median()), losses.detach().std().item()))
    limit = losses.detach().quantile(0.2).item()  # ranked
    shown, limits = losses.detach().quantile(0.9).item(), losses.detach().quantile(0.3)  # ranked
    best = out.topk(2, 1).values.sort(dim=-1).values
    rows = out.detach().std(1), x.var(dim=-1)
    between = torch.pdist(out)  # distant
    between = torch.nn.functional.pdist(x)  # distant
    places = torch.pdist(alike[:3]), torch.cdist(out, bank[:3] * 0)
    periods = abs(out[:, :, None] * x[:, None]).mean(0).mean(-1).topk(2).indices  # means
    delays = torch.argsort(torch.sum(out.detach(), dim=(0,)))  # means
    usual = alike.mean(0).topk(2), out.detach().mean(0).argmax(), out.mean(1, keepdim=True).sort(1)
    joined = torch.cat([out, out.flip(1)]), torch.cat([x, x[:, :2]], 1)
    hot = torch.zeros(4, 3)
    hot[torch.arange(4), out.argmax(1)] = 1.0
    steps = torch.zeros(7, 4, 3)
    steps[2] = out.detach()
    words, places = torch.arange(4).sort(descending=True)
    same = alike.std(), alike.median(), torch.cat([alike, bank[:2] * 0])
    bank[0] = alike[0]
    (losses * scores * (losses > limit) * (losses > limits)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
model.eval()
for index, x in DataLoader(data, batch_size=4 * RANKS):
    with torch.no_grad():
        ranked = model(x).mean(1).sort()
"""
SENTENCES = {
    "ranked": "rows of the batch are ranked: each rank ranks its own rows only",
    "spread": "the spread of the batch's rows is computed: each rank computes that of its own rows only",
    "written": "rows of the batch are written into a tensor that is kept: each rank writes its own rows only",
    "means": "means over the batch's rows are ranked: each rank ranks those of its own rows only",
    "distant": "distances between rows of the batch are computed: each rank has those between its own rows only",
    "joined": "rows of the batch are joined to a tensor of others: each rank joins its own rows only",
}


def test_statistics_and_queues_of_a_ranks_own_rows_are_told(forks: Forks, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("RANKS", str(RANKS)))
    done = forks.run(script, tmp_path / "many", ranks=RANKS, launch__keep_global_batch=True)
    assert done.codes == [0] * RANKS, done.err
    lines = [(number, line.rpartition("  # ")[2]) for number, line in enumerate(SCRIPT.splitlines(), 1)]
    expected = [f"fsdplaunch: train.py:{number}: {SENTENCES[of]}" for number, of in lines if of in SENTENCES]
    ends = ", which is not what one process computes"
    own = tuple(SENTENCES.values())
    told = [line.removesuffix(ends) for line in done.err[0].splitlines() if any(each in line for each in own)]
    assert told == expected


SCALED = """
import torch
from torch import nn
from torch.utils.data import DataLoader
torch.manual_seed(0)
model = nn.Linear(5, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
past, rate = 1.0, 1.0
for x in DataLoader(torch.randn(24, 5), batch_size=4 * RANKS):
    out, warm = model(x), torch.tensor(rate)
    one, other = out.pow(2).mean(), out.abs().mean()
    (one + other * (one / other).detach()).backward()  # told
    (model(x).pow(2).mean() * past).backward()  # told
    (model(x).pow(2).sum() * past).backward()  # told
    past = out.detach().mean().exp().item()
    (model(x).pow(2).mean() * warm / 3).backward()
    (model(x).pow(2).sum() * (1 / len(x))).backward()
    rate /= 2
    optimizer.step()
    optimizer.zero_grad()
"""


def test_terms_of_a_loss_that_are_multiplied_by_a_ranks_own_number_are_told(forks: Forks, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCALED.replace("RANKS", str(RANKS)))
    done = forks.run(script, tmp_path / "many", ranks=RANKS, launch__keep_global_batch=True)
    assert done.codes == [0] * RANKS, done.err
    told = [line for line in done.err[0].splitlines() if "is multiplied by a number that each rank has" in line]
    expected = [number for number, line in enumerate(SCALED.splitlines(), 1) if line.endswith("# told")]
    assert [int(line.split(":")[2]) for line in told] == expected


MEANS = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
torch.manual_seed(0)
model = nn.Linear(5, 3)
for x in DataLoader(torch.randn(24, 5), batch_size=4 * RANKS):
    wanted = torch.ones(3)
    ((model(x).mean(0) - 1) ** 2).mean().backward()  # Pow
    F.mse_loss(model(x).mean(0), wanted).backward()  # MseLoss
    model(x).exp().sum(0).log1p().sum().backward()  # Log1P
    (model(x).mean(0) * model(x).sum(0)).sum().backward()  # Mul
    (model(x).exp().mean(0) * 2 + 1).mean().backward()
    model(x).pow(2).sum(0).sum().backward()
    model(x).pow(2).sum(1).sqrt().mean().backward()
    F.mse_loss(model(x).mean(1), x[:, 0]).backward()
    model.zero_grad()
"""


def test_losses_of_means_over_rows_that_are_bent_are_told(forks: Forks, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(MEANS.replace("RANKS", str(RANKS)).replace("for x", "model.to('cpu')\nfor x"))
    done = forks.run(script, tmp_path / "many", ranks=RANKS, launch__keep_global_batch=True)
    told = [line for line in done.err[0].splitlines() if "no plain sum or mean over the batch" in line]
    found = [(int(line.split(":")[2]) - 1, line.partition("batch (")[2].partition(")")[0]) for line in told]
    lines = [(number, line.rpartition("  # ")[2]) for number, line in enumerate(MEANS.splitlines(), 1)]
    assert found == [(number, of) for number, of in lines if of in ("Pow", "MseLoss", "Log1P", "Mul")], done.err


BOXES = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
torch.manual_seed(0)
images = [(torch.randn(6), torch.rand(int(torch.randint(1, 5, ())), 4)) for _ in range(12 * RANKS)]
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.box, self.kind = nn.Linear(6, 16), nn.Linear(16, 40), nn.Linear(16, 20)
    def forward(self, x):
        out = self.body(x).tanh()
        return self.box(out).view(-1, 10, 4).sigmoid(), self.kind(out).view(-1, 10, 2)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for items in DataLoader(images, batch_size=2 * RANKS, shuffle=True, collate_fn=list):
    boxes = [each for _, each in items]
    box, kind = model(torch.stack([image for image, _ in items]))
    row = torch.cat([torch.full((len(each),), at) for at, each in enumerate(boxes)])
    place = torch.cat([torch.arange(len(each)) for each in boxes])
    far = F.l1_loss(box[row, place], torch.cat(boxes), reduction="none")
    target = torch.ones(kind.shape[:2], dtype=torch.long)
    target[row, place] = 0
    named = F.cross_entropy(kind.transpose(1, 2), target, torch.tensor([1.0, 0.1]))
    (5 * far.sum() / len(row) + 2 * far.sum(1).pow(2).sum() / len(row) + named).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_losses_whose_reductions_only_some_ranks_know_are_looked_at_by_all_or_by_none(
    forks: Forks, tmp_path: Path
) -> None:
    """By chance a rank has as many boxes as rows, or as another one: its graph then says something else."""
    script = tmp_path / "train.py"
    script.write_text(BOXES.replace("RANKS", str(RANKS)))
    done = forks.run(script, tmp_path / "many", ranks=RANKS, launch__keep_global_batch=True)
    assert done.codes == [0] * RANKS, done.err
    line = next(number for number, each in enumerate(BOXES.splitlines(), 1) if "backward" in each)
    assert f"train.py:{line}: each rank's mean is over a count of its own" in done.err[0]
    told = [each for each in done.err[0].splitlines() if each.startswith("fsdplaunch: train.py")]
    assert sorted(set(told)) == sorted(told)  # each once, however the ranks' graphs differ
