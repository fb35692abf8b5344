"""The watchdog and restarts."""

import time

import pytest

from fsdplaunch.agent.watchdog import ANSWER_SECONDS
from tests.e2e.conftest import wait_for

STALL = """
import os, time
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
weight = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight])
for _ in range(3):
    optimizer.step()

def load_batch():
    while not os.path.exists("go"): time.sleep(0.05)

if rank == 1:
    load_batch()
dist.all_reduce(torch.ones(1))
"""


ONCE = """
import os, sys
import torch, torch.distributed as dist
torch.set_num_threads(1)
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("attempt", attempt)
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
if attempt == 0 and dist.get_rank() == 1:
    sys.exit(7)
dist.barrier()
print("total", total.item())
"""


ALWAYS = "import os, sys; sys.exit(5 if os.environ['RANK'] == '1' else 0)"


@pytest.fixture(scope="module")
def watched(side_by_side):
    cases = {
        "stall": (STALL, "--stall-seconds", "2"),
        "once": (ONCE, "--max-restarts", "2"),
        "always": (ALWAYS, "--max-restarts", "1"),
    }
    return side_by_side(run_until_seen, cases)


def run_until_seen(start, folder, *case):
    """Run to the end; a rank that is behind goes on once its stack has been written."""
    run = start(*case)
    if case[0] is STALL:
        stack = folder / "runs" / "latest" / "ranks" / "1" / "stack.txt"
        while "load_batch" not in wait_for(stack):  # a slow start may be one, too
            time.sleep(0.05)
        time.sleep(ANSWER_SECONDS + 1)  # until it is told of
        (folder / "go").touch()
    run.end()
    return run


def test_stall_names_the_rank_that_is_behind_and_keeps_every_stack(watched):
    run = watched["stall"].result()
    assert run.code == 0, run.stderr
    said = [line.removeprefix("fsdplaunch: ") for line in run.stderr.splitlines() if "has made a step" in line]
    assert any("1 rank waits for rank 1 (step 3, t.py:13 in load_batch)" in line for line in said)
    assert "in load_batch" in run.log(1, "stack.txt")
    assert "in all_reduce" in run.log(0, "stack.txt")
    assert run.json()["notes"] == said


def test_rank_that_dies_once_is_recovered_from(watched):
    run = watched["once"].result()
    assert run.code == 0, run.stderr
    attempts = run.json("agent.json")["attempts"]
    assert [attempt["cause"] and attempt["cause"]["rank"] for attempt in attempts] == [1, None]
    assert attempts[0]["cause"]["code"] == 7
    assert run.log(0) == "attempt 0\n"
    assert run.log(0, "stdout.attempt2.log") == "attempt 1\ntotal 2.0\n"
    assert "attempt 2 of 3 (rank 1 failed with exit code 7)" in run.stderr
    assert [attempt["cause"] for attempt in run.json()["attempts"]] == ["rank 1 failed with exit code 7", None]


def test_restarts_that_are_used_up_end_with_the_last_failure(watched):
    run = watched["always"].result()
    assert run.code == 5
    assert len(run.json("agent.json")["attempts"]) == 2
