"""A launch that is asked to stop saves and says so; started again it goes on. One that fails resumes by itself."""

import json
import re
import signal
import time

import pytest

from fsdplaunch.step_record import read_steps
from tests.e2e.conftest import starting

CRASHING = """
import os
import torch, fsdplaunch
from torch import nn

model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
model, optimizer = fsdplaunch.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
state = {"model": model, "optimizer": optimizer}
try:
    done = fsdplaunch.load_checkpoint("c", **state)["step"]
except FileNotFoundError:
    done = 0
print("begins after", done, flush=True)
for step in range(done + 1, 7):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    fsdplaunch.save_checkpoint("c", step=step, **state)
    if step == 4 and done == 0 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), 9)
"""

LAST = """
import sys, torch, fsdplaunch
from fsdplaunch.runtime.saving import save_job
from torch import nn

model = fsdplaunch.prepare(nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))))
if sys.argv[1] == "fails":
    def fail(*_):
        raise OSError(28, "No space left on device")
    save_job.durable_file = fail
fsdplaunch.save_checkpoint("c", model=model, step=1)
print("the script is over", flush=True)
"""

WRAP = ("--use-cpu", "--fsdp-auto-wrap-policy", "SIZE_BASED_WRAP", "--fsdp-min-num-params", "1")


@pytest.fixture
def start_lm(warm_environ, examples, tmp_path):
    """Return a function that starts the example's training for some steps."""
    with starting(tmp_path, warm_environ) as start:

        def launch(steps: int):
            script = (str(examples / "train_lm.py"), "--steps", str(steps), "--save-every", "100000")
            return start(None, "--use-cpu", arguments=script, plain=False)

        yield launch


def test_stopped_run_saves_exits_75_and_goes_on_when_started_again(start_lm, tmp_path):
    run = start_lm(100_000)
    limit = time.monotonic() + 60
    while not ((record := read_steps(run.dir / "ranks/0")) and record.made > 1):  # has asked once
        assert run.process.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.1)
    run.signal(signal.SIGTERM)
    assert run.end() == 75, run.stderr
    assert "every worker ended cleanly, launch it again to resume" in run.stderr
    (saved,) = (tmp_path / "checkpoints" / "lm").glob("checkpoint-*")
    step = int(saved.name.removeprefix("checkpoint-"))
    assert json.loads((saved / "fsdplaunch.json").read_text())["complete"]

    done = start_lm(step + 2)
    assert done.end() == 0, done.stderr
    assert f"resumed after step {step}\n" in done.stdout
    assert f"step {step + 2} " in done.stdout
    assert f"checkpoint: checkpoints/lm/checkpoint-{step + 2}" in done.stdout


def test_restart_after_a_kill_resumes_from_the_newest_complete_checkpoint(fsdplaunch, tmp_path):
    (tmp_path / "train.py").write_text(CRASHING)
    done = fsdplaunch("launch", *WRAP, "--max-restarts", "1", "train.py")
    assert done.returncode == 0, done.stderr
    first, again = map(int, re.findall(r"begins after (\d+)", done.stdout))
    assert first == 0
    assert again in (3, 4)  # the fourth was done on rank 1; rank 0 may have been putting it in place
    assert json.loads((tmp_path / "c/checkpoint-6/fsdplaunch.json").read_text())["step"] == 6


@pytest.mark.parametrize("how", ["succeeds", "fails"])
def test_end_of_the_script_waits_for_a_save_beside_it(fsdplaunch, tmp_path, how):
    (tmp_path / "train.py").write_text(LAST)
    done = fsdplaunch("launch", *WRAP, "--set", "checkpoint.async=true", "train.py", how)
    assert "the script is over" in done.stdout
    if how == "succeeds":
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "c/checkpoint-1/fsdplaunch.json").exists()
        return
    assert done.returncode == 1
    assert (
        f"cannot save {tmp_path}/c/checkpoint-1: rank 0: OSError: [Errno 28] No space left on device"
        in done.stderr
    )
    assert not list((tmp_path / "c").iterdir())
