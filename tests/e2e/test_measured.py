"""What a launch measures, against the script's own clock, and whom it names."""

import json
from itertools import pairwise
from statistics import median

import pytest

from fsdplaunch.launch.step_summary import read_ranks

SCRIPT = """
import json, os, sys, time
import torch
from torch import nn
torch.set_num_threads(1)
rank, slow = int(os.environ["RANK"]), sys.argv[1]

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4 * 2 * 40
    def __getitem__(self, index):
        if slow == "loader" and rank == 1 and index % 4 == 0:
            time.sleep(0.03)
        return torch.full((16,), index % 7)

model = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 8))
if os.environ["TRAINING_WAY"] == "ddp":
    import torch.distributed as dist
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
moments = []  # of the very end of each step: what comes between the two clocks is no step's time
optimizer.register_step_post_hook(lambda *_: moments.append(time.perf_counter()))
for batch in torch.utils.data.DataLoader(Rows(), batch_size=4):
    model(batch).square().mean().backward()
    time.sleep(0.04 if slow == "sleep" and rank == 1 else 0.01)
    optimizer.step()
    optimizer.zero_grad()
    if len(moments) == 40:
        break
print(json.dumps(moments))
"""
SECRET = "hunter2-of-launch-env"


@pytest.fixture(scope="module")
def measured(side_by_side):
    """Runs on two workers, one of which waits for its loader, one sleeps, or none is slow."""

    def run(start, folder, slow, way):
        variables = json.dumps({"API_TOKEN": SECRET, "TRAINING_WAY": way})
        options = ["--set", f"launch.env={variables}", "--set", "launch.metrics={jsonl: steps.jsonl}"]
        options += ["--use-cpu", "--num-processes", "2"] if way == "fsdp" else []
        run = start(SCRIPT, *options, arguments=(slow,), plain=way == "ddp")
        assert run.end() == 0, run.stderr
        return run

    return side_by_side(
        run, {"loader": ("loader", "ddp"), "sleep": ("sleep", "fsdp"), "nobody": ("nobody", "ddp")}
    )


@pytest.mark.parametrize(("slow", "cause"), [("loader", "input"), ("sleep", "compute"), ("nobody", None)])
def test_the_slow_rank_is_named_at_the_end_and_nobody_else(measured, slow, cause):
    run = measured[slow].result()
    found = run.json()["summary"]
    assert found["step"] == 40
    if cause is None:
        assert found["slowest"] is None
        assert "is slow" not in run.stderr
    else:
        assert (found["slowest"]["rank"], found["slowest"]["cause"]) == (1, cause)
        assert found["bound_by"] == "straggler"
        assert f"rank 1 is slow ({cause})" in run.stderr
    assert "40 steps, " in run.stderr
    assert "% waiting for data" in run.stderr


def last_steps(moments):
    """Return the steps of a script's clock that medians are of: of the last ten seconds, or the last twenty."""
    steps = list(pairwise(moments))
    recent = [step for step in steps if step[1] > moments[-1] - 10]
    return [after - before for before, after in (recent if len(recent) > 20 else steps[-20:])]


@pytest.mark.parametrize("slow", ["loader", "sleep"])
def test_numbers_are_those_of_the_scripts_own_clock(measured, slow):
    run = measured[slow].result()
    found = run.json()["summary"]
    medians = []
    for row in found["ranks"]:
        moments, record = json.loads(run.log(row["rank"])), read_ranks(run.dir)[row["rank"]].recent
        assert [int(step.number) for step in record] == list(range(1, 41))
        own = [after - before for before, after in pairwise(moments)]
        # A busy machine makes both clocks' steps long, and may come between the two readings of one or two.
        apart = sorted(abs(step.seconds / seconds - 1) for step, seconds in zip(record[1:], own, strict=True))
        assert apart[-4] < 0.03
        assert sum(step.seconds for step in record[1:]) == pytest.approx(sum(own), rel=0.03)
        medians.append(median(last_steps(moments)))
        assert row["step_seconds"] == pytest.approx(medians[-1], rel=0.03)
    assert found["steps_per_second"] == pytest.approx(1 / found["step_seconds"])
    assert found["tokens_per_second"] == pytest.approx(2 * 4 * 16 / median(medians), rel=0.03)
    assert found["samples_per_second"] == pytest.approx(2 * 4 / median(medians), rel=0.03)
    rows = [json.loads(line) for line in (run.folder / "steps.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert {row["tokens"] for row in rows} == {2 * 4 * 16}


def test_values_of_launch_env_are_in_none_of_it(measured):
    run = measured["loader"].result()
    assert read_ranks(run.dir)
    files = [run.folder / "steps.jsonl", *(path for path in run.dir.rglob("*") if path.is_file())]
    assert [path.name for path in files if SECRET.encode() in path.read_bytes()] == []
    assert SECRET not in run.stdout + run.stderr
