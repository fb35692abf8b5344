"""With the global batch kept: which rows ranks read, and what libraries count of them."""

from pathlib import Path
from typing import Any

import pytest

from tests.scripts.conftest import EQUAL, RANKS, Forks


@pytest.mark.parametrize("keep", [True, False])
def test_rows_sliced_from_a_tensor_are_divided_or_warned_of(forks: Forks, tmp_path: Path, keep: bool) -> None:
    plain = forks.run(EQUAL / "rows.py", tmp_path / "plain")
    many = forks.passes(EQUAL / "rows.py", tmp_path / "many", ranks=RANKS, launch__keep_global_batch=keep)
    warned = f"rows.py:14: all {RANKS} ranks compute the same rows, because no DataLoader divides them"
    assert many.err[0].count(warned) == (not keep)
    assert (f"16 rows are divided over {RANKS} ranks" in many.err[0]) == keep
    assert many.losses() == pytest.approx(plain.losses(), abs=1e-5)


LATE = """
import torch
from torch import nn
from torch.utils.data import DataLoader
torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train, valid = (DataLoader(torch.randn(rows, 4), batch_size=8) for rows in (32, 24))
for epoch in range(2):
    for x in train:
        model.train()
        with torch.no_grad():
            model(x)
        model(x).square().mean().backward()
        optimizer.step()
model.train()
for x in valid:
    model.eval()
    model(x)
for x in valid:
    model(x)
"""


def test_a_loader_begun_before_the_model_evaluates_is_told(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LATE)
    many = forks.passes(tmp_path / "train.py", tmp_path / "many", ranks=RANKS)
    told = "train.py:17: each rank evaluates its own share of the rows"
    assert many.err[0].count(told) == many.err[0].count("its own share of the rows") == 1


METRICS = {
    "torchmetrics/__init__.py": "",
    "torchmetrics/metric.py": """
import torch
import torch.distributed as dist
class Metric:  # of the shape of torchmetrics'
    def __init__(self):
        self.rows, self.update = torch.zeros(()), self._wrap_update(self.update)
    def _wrap_update(self, update):
        return update
    def update(self, rows):
        self.rows += len(rows)
    def sync(self):
        if dist.is_initialized():
            dist.all_reduce(self.rows)
    def compute(self):
        self.sync()
        return self.rows.item()
""",
    "ignite/__init__.py": "",
    "ignite/distributed.py": """
import torch.distributed as dist
def get_world_size():
    return dist.get_world_size() if dist.is_initialized() else 1
""",
    "ignite/metrics.py": """
import torch
import torch.distributed as dist
import ignite.distributed as idist
class Metric:  # of the shape of pytorch-ignite's
    def __init__(self):
        self.rows = torch.zeros(())
    def update(self, rows):
        self.rows += len(rows)
    def compute(self):
        if idist.get_world_size() > 1:
            dist.all_reduce(self.rows)
        return self.rows.item()
""",
    "train.py": """
import torch
from torch import nn
from torch.utils.data import DataLoader
from ignite import metrics as ignite_metrics
from torchmetrics.metric import Metric
torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train, valid = (DataLoader(torch.randn(rows, 4), batch_size=8) for rows in (32, 24))
for epoch in range(2):
    model.train()
    seen, evaluated = [Metric(), ignite_metrics.Metric()], [Metric(), ignite_metrics.Metric()]
    for number, x in enumerate(train):
        model(x).square().mean().backward()
        optimizer.step()
        for metric in seen:
            metric.update(x)
        if number == 0:
            model.eval()
            with torch.no_grad():
                for rows in valid:
                    model(rows)
                    for metric in evaluated:
                        metric.update(rows)
            print("evaluated:", *(metric.compute() for metric in evaluated))
            model.train()
    print("trained:", *(metric.compute() for metric in seen))
""",
}


def test_metrics_that_libraries_add_up_over_ranks_count_each_row_once(forks: Forks, tmp_path: Path) -> None:
    for name, text in METRICS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    many = forks.passes(tmp_path / "train.py", tmp_path / "many", ranks=RANKS, launch__keep_global_batch=True)
    assert many.out == ["evaluated: 24.0 24.0\ntrained: 32.0 32.0\n" * 2] * RANKS


LOADERS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
class Own(DataLoader):
    def __iter__(self):
        return self._get_iterator()
torch.manual_seed(0)
rows = TensorDataset(torch.randn(32, 5), torch.randn(32, 4))
model = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 4)).to("cpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for inputs, wanted in KIND(rows, batch_size=8, sampler=DistributedSampler(rows, num_replicas=1, rank=0)):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), wanted)
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.6f}")
"""


@pytest.mark.parametrize(("kind", "named"), [("DataLoader", None), ("Own", "Own")])
def test_a_sampler_for_one_replica_is_divided_and_a_loader_with_its_own_iter_is_told(
    forks: Forks, tmp_path: Path, kind: str, named: str | None
) -> None:
    plain = forks.run(LOADERS.replace("KIND", kind), tmp_path / "plain")
    many = forks.passes(LOADERS.replace("KIND", kind), tmp_path / "many", ranks=RANKS)
    assert (f"batches of 8 on each of {RANKS} ranks" in many.err[0]) == (named is None)
    warned = f"all {RANKS} ranks compute the same rows, because no DataLoader divides them"
    assert many.err[0].count(warned) == many.err[0].count("compute the same rows") == (named is not None)
    kept = forks.passes(
        LOADERS.replace("KIND", kind), tmp_path / "kept", ranks=RANKS, launch__keep_global_batch=True
    )
    assert kept.losses() == pytest.approx(plain.losses(), abs=1e-5)


ACCELERATED = """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
inputs = torch.randn(32, 4)
accelerator = Accelerator(cpu=True)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(TensorDataset(inputs), batch_size=8))
for (x,) in loader:
    loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.6f} rows {len(x)}")
"""


def test_accelerate_divides_the_batches_that_it_makes(forks: Forks, tmp_path: Path) -> None:
    plain = forks.run(ACCELERATED, tmp_path / "plain")
    keys: dict[str, Any] = {"launch__keep_global_batch": True, "fsdp_config__fsdp_auto_wrap_policy": "NO_WRAP"}
    many = forks.passes(ACCELERATED, tmp_path / "many", ranks=RANKS, **keys)
    assert many.out[0].count("rows 4") == 4
    assert many.losses() == pytest.approx(plain.losses(), abs=1e-5)


def test_script_that_divides_its_batches_itself_cannot_have_them_kept(forks: Forks, tmp_path: Path) -> None:
    text = """
import torch
from torch.distributed.fsdp import fully_shard
model = fully_shard(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
other = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=1.0)
"""
    done = forks.run(text, tmp_path / "run", ranks=RANKS, launch__keep_global_batch=True)
    assert done.codes == [1] * RANKS
    assert "keep_global_batch is set, and the script divides its batches itself" in done.err[0]


OTHERS = """
import os, random
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset
torch.manual_seed(0)
rows = torch.randn(64, 4)
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
class Stream(IterableDataset):
    def __iter__(self):
        return iter(rows[rank::world])
order = list(range(64))
random.SystemRandom().shuffle(order)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for data in (DATA,):
    for x in DataLoader(data, batch_size=8):
        model(x).square().mean().backward()
        optimizer.step()
"""


def test_data_that_differ_by_rank_end_a_run_that_keeps_the_global_batch(forks: Forks, tmp_path: Path) -> None:
    kinds = ("rows[rank::world]", "Subset(rows, order)", "Stream()")
    texts = {kind: OTHERS.replace("DATA", kind) for kind in kinds}
    for kind, run in forks.beside(tmp_path, texts, launch__keep_global_batch=True).items():
        for err in run.err:
            assert "train.py:17: Linear gets different values on rank 1 than on rank 0" in err, kind
