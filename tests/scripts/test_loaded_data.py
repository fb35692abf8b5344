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
for data in (rows, Subset(rows, range(64)), DATA):
    for x in DataLoader(data, batch_size=8):
        model(x).square().mean().backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("data", "kept", "items"),
    [
        ("rows[rank::world]", True, 64 // RANKS),
        ("rows[rank::world]", False, 64 // RANKS),
        ("Subset(rows, range(rank, 64, world))", True, 64 // RANKS),
        ("Subset(rows, order)", True, 64),
        ("Stream()", True, 8),  # the first batch
    ],
)
def test_data_that_ranks_have_of_their_own_are_told_when_they_are_first_read(
    forks: Forks, tmp_path: Path, data: str, kept: bool, items: int
) -> None:
    script = tmp_path / "train.py"
    script.write_text(OTHERS.replace("DATA", data))
    many = forks.run(script, tmp_path / "many", ranks=RANKS, launch__keep_global_batch=kept)
    assert many.codes == [0] * RANKS, many.err
    assert many.err[0].count(f"train.py:16: ranks hold different data ({items} items)") == 1


PADDED = """
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
torch.manual_seed(0)
rows = [torch.randn(2 + (number * 7) % 9, 4) for number in range(32)]
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def padded(items):
    return pad_sequence(items)
def masked(items):
    return pad_sequence(items, True), pad_sequence([torch.ones(len(each)) for each in items], True)
def counted(items):
    return pad_sequence(items, True), [len(each) for each in items]
def cut(items):
    return torch.stack([each[:2] for each in items])
for collate in (padded, masked, counted, cut):
    for x in DataLoader(rows, batch_size=8, collate_fn=collate):
        x = x if collate in (padded, cut) else x[0]
        model(x).square().mean().backward()
        optimizer.step()
"""


@pytest.mark.parametrize("first", ["padded", "masked", "counted", "cut"])
def test_rows_that_each_rank_pads_to_its_longest_are_told_unless_there_is_a_mask(
    forks: Forks, tmp_path: Path, first: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(PADDED.replace("in (padded, masked, counted, cut)", f"in ({first},)"))
    many = forks.run(script, tmp_path / "many", ranks=RANKS, launch__keep_global_batch=True)
    assert many.codes == [0] * RANKS, many.err
    told = "train.py:19: rows are padded to the longest of each rank's own"
    assert many.err[0].count(told) == (first == "padded")


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
    for epoch in zip(*read, strict=True):
        assert sorted(int(number) for rows in epoch for number in rows) == list(range(32))
    if kept:
        assert many.losses() == pytest.approx(plain.losses(), abs=1e-5)
