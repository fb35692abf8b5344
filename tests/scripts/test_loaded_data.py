"""What each rank reads where its data, or what orders them, are of no plain loader's kind."""

from pathlib import Path

import pytest

from tests.scripts.conftest import RANKS, Forks

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


@pytest.mark.parametrize("data", ["rows[rank::world]", "Subset(rows, order)", "Stream()"])
def test_data_that_differ_by_rank_end_a_run_that_keeps_the_global_batch(
    forks: Forks, tmp_path: Path, data: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(OTHERS.replace("DATA", data))
    many = forks.run(script, tmp_path / "many", ranks=RANKS, launch__keep_global_batch=True)
    assert many.codes == [1] * RANKS, many.err
    assert "train.py:17: Linear is given other values on rank 1 than on rank 0" in many.err[0]


ENDLESS = """
import torch
from torch.utils.data import DataLoader, TensorDataset
class Repeating:
    def __init__(self, sampler):
        self.sampler = sampler
    def __iter__(self):
        while True:
            yield from iter(self.sampler)
class Endless(DataLoader):  # as YOLOv5's
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "batch_sampler", Repeating(self.batch_sampler))
        self.iterator = super().__iter__()
    def __len__(self):
        return len(self.batch_sampler.sampler)
    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = Endless(TensorDataset(torch.randn(32, 4), torch.arange(32)), batch_size=4, shuffle=True)
for _ in range(2):
    read = []
    for x, number in loader:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.6f}")
        read += number.tolist()
    print("read", *read)
"""


@pytest.mark.parametrize("kept", [True, False])
def test_a_loader_that_never_ends_gives_each_row_once_in_as_many_batches_as_it_says(
    forks: Forks, tmp_path: Path, kept: bool
) -> None:
    script = tmp_path / "train.py"
    script.write_text(ENDLESS)
    plain = forks.run(script, tmp_path / "plain")
    many = forks.run(script, tmp_path / "many", ranks=RANKS, launch__keep_global_batch=kept)
    assert many.codes == [0] * RANKS, many.err
    read = [[line.split()[1:] for line in out.splitlines() if line.startswith("read")] for out in many.out]
    for epoch in zip(*(read[:1] if kept else read), strict=True):  # with the global batch each rank reads all rows
        assert sorted(int(number) for rows in epoch for number in rows) == list(range(32))
    if kept:
        assert many.losses() == pytest.approx(plain.losses(), abs=1e-5)
