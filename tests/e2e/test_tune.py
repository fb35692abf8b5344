"""`fsdplaunch tune` on two CPU workers: what it finds, and what it leaves behind and untouched."""

import json
import re
import signal
import subprocess
import sys
import time

from tests.e2e.conftest import clean_environ

SCRIPT = """
import os, time, torch
from torch import nn
torch.set_num_threads(1)
model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
rows = torch.utils.data.TensorDataset(torch.randn(4000, 16))
print("output of the script")
for (x,) in torch.utils.data.DataLoader(rows, batch_size=4):
    if os.environ["FSDP_ACTIVATION_CHECKPOINTING"] == "true":
        raise ValueError("no checkpointing here")
    # The known answer, by far more than what a busy machine adds to a step.
    time.sleep(0.4 if os.environ["FSDP_RESHARD_AFTER_FORWARD"] == "true" else 0.01)
    model(x).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with open(os.environ.get("OUT", "log.txt"), "a") as log:
        log.write("step")
torch.save(model.state_dict(), "model.pt")
"""
TRIES = ("--try", "fsdp_reshard_after_forward=false", "--try", "fsdp_activation_checkpointing=true")


def test_a_search_finds_the_known_best_and_leaves_the_users_files_alone(fsdplaunch, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "fsdp.yaml").write_text("# mine\nfsdp_config:\n  fsdp_version: 2\n")
    (tmp_path / "log.txt").write_text("x" * (2 << 20))  # too large to be copied: a link until it is written
    done = fsdplaunch("tune", "--steps", "4", *TRIES, "--json", "--write", "fast.yaml", "train.py")
    assert done.returncode == 0, done.stderr
    assert "output of the script" not in done.stdout + done.stderr
    assert re.search(r"^  yours: \d+\.\d ms \(.* to .*\) per step$", done.stderr, re.MULTILINE)
    found = json.loads(done.stdout)
    assert found["best"] == {"fsdp_config.fsdp_reshard_after_forward": False}
    assert found["complete"] is True
    rows = {str(row["changes"]): row for row in found["candidates"]}
    yours, keeps, fails = rows["{}"], rows[str(found["best"])], found["candidates"][2]
    assert (yours["state"], keeps["state"], fails["state"]) == ("slower", "measured", "failed")
    assert re.fullmatch("rank [01]: ValueError: no checkpointing here", fails["reason"])
    assert yours["step_seconds"] >= 0.4
    assert 0.01 <= keeps["step_seconds"] < yours["step_seconds"]
    assert yours["memory"] > 50 << 20
    assert found["comparisons"][0]["verdict"] == "first"
    assert "# mine" in (tmp_path / "fast.yaml").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "fast.yaml", "fsdp.yaml", "log.txt", "runs", "train.py",
    ]  # fmt: skip
    assert (tmp_path / "log.txt").stat().st_size == 2 << 20
    assert not list(tmp_path.glob("runs/*/work"))
    folder = tmp_path / found["folder"]
    assert json.loads((folder / "tune.json").read_text())["best"] == found["best"]
    assert "output of the script" in (folder / "trials/001/ranks/0/stdout.log").read_text()


def test_a_search_that_is_stopped_says_what_it_knows(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "fsdplaunch", "tune", "--steps", "4", *TRIES, "train.py"]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    running = subprocess.Popen(command, cwd=tmp_path, env=clean_environ(), text=True, **streams)
    wait_until_second_trial(tmp_path)
    running.send_signal(signal.SIGINT)
    stdout, stderr = running.communicate(timeout=120)
    assert running.returncode == 130, stderr
    assert "so far, yours is the one to keep" in stdout


def wait_until_second_trial(folder):
    end = time.monotonic() + 90
    while time.monotonic() < end and not list(folder.glob("runs/*-tune/trials/002/ranks/*")):
        time.sleep(0.05)


def test_a_script_that_writes_elsewhere_is_stopped_before_it_does(fsdplaunch, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = fsdplaunch("tune", "--steps", "3", *TRIES, "train.py", OUT=str(tmp_path / "out.txt"))
    assert done.returncode == 1
    assert "out.txt is outside the folder that a measured run may write to" in done.stderr
    assert "hint:  give the script a folder below this one, as a relative path; or --allow-writes" in done.stderr
    assert not (tmp_path / "out.txt").exists()
