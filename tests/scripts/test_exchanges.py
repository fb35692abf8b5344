"""What a script for DistributedDataParallel exchanges by itself, or not by all ranks; streams that only write."""

import re
from pathlib import Path

import pytest

from tests.scripts.conftest import Forks

HEAD = """
import copy, os, sys
import torch, torch.distributed as dist
from torch import nn
class Tee:
    def __init__(self, stream):
        self.stream = stream
    def write(self, text):
        self.stream.write(text)
sys.stdout, sys.stderr = Tee(sys.stdout), Tee(sys.stderr)
dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
torch.manual_seed(rank)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
ema = [copy.deepcopy(model.module) for _ in range(2)][1]
def step():
    optimizer.zero_grad()
    model(torch.ones(2, 4) * rank).pow(2).mean().backward()
    optimizer.step()
step()
"""

CHECKED = """
for kept in (model, ema):
    for name, value in kept.named_parameters():
        before = value.full_tensor()
        other = value.detach().clone()
        dist.broadcast(tensor=other, src=0)
        assert (value == other).all(), name
        dist.broadcast(value.data, 1)
        assert torch.equal(value.full_tensor(), before)
step()
print("checked")
"""

UNEVEN = """
from fsdplaunch.runtime.collectives import waits
waits.NOTICE_SECONDS, waits.CONFIRM_SECONDS, waits.STILL_SECONDS = 0.5, 0.5, 0.5
model.eval()
count = 0
with torch.no_grad():
    for item in range(5):
        if item % 2 == (rank + MORE) % 2:
            count += model(torch.ones(2, 4)).numel()
total = torch.tensor(count)
dist.all_reduce(total)
step()
print(int(total))
"""


def test_weights_that_all_ranks_have_are_sent_as_they_are(forks: Forks, tmp_path: Path) -> None:
    done = forks.passes(HEAD + CHECKED, tmp_path / "run", ranks=2)
    assert [out.splitlines() for out in done.out] == [["checked"]] * 2
    assert ", for the script, " in done.err[0]
    assert done.err[0].count("sharded Sequential: ") == 1  # what is copied of it is not named


@pytest.mark.parametrize("more", [0, 1])
def test_rank_0_may_have_more_rows_to_evaluate_than_others_and_others_more_than_rank_0_not(
    forks: Forks, tmp_path: Path, more: int
) -> None:
    done = forks.run(HEAD + UNEVEN.replace("MORE", str(more)), tmp_path / "run", ranks=2, timeout=60)
    if more:
        assert 0 not in done.codes
        says = r"Sequential in evaluation at train.py:\d+.* was called on rank 1 only"
        assert re.search(says, done.err[1]), done.err
        assert "give all ranks the same number of batches" in done.err[1]
    else:
        assert done.codes == [0, 0], done.err
        assert done.out == ["30\n", "30\n"]
        assert "rank 0 alone calls Sequential" in done.err[0]
