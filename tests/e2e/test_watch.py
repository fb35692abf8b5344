"""A real run, seen while it runs and afterwards: what each rank does, the slow one, what its start noted."""

import json
import subprocess
import sys
from pathlib import Path

from tests.e2e.conftest import starting

TRAIN = """
import os, sys, time, torch, fsdplaunch
from pathlib import Path
model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = fsdplaunch.prepare(model, optimizer)
for step in range(1, 31):
    model(torch.ones(2, 8)).sum().backward()
    time.sleep(0.06 if os.environ["RANK"] == "1" else 0.01)
    optimizer.step()
    optimizer.zero_grad()
    if step == 25:
        fsdplaunch.save_checkpoint("ckpt", model=model, optimizer=optimizer, step=step)
        Path(f"reached{os.environ['RANK']}").write_text("25")
        while not Path("go").exists():
            time.sleep(0.02)
"""


def seen(folder: Path, environ: dict[str, str], *words: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-m", "fsdplaunch", *words, "--json"],
        cwd=folder, env=environ, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def test_a_run_is_seen_while_it_runs_and_when_it_has_ended(tmp_path, warm_environ):
    (tmp_path / "t.py").write_text(TRAIN)
    for words in (
        ["init", "-q"],
        ["add", "t.py"],
        ["-c", "user.name=a", "-c", "user.email=a", "commit", "-qm", "x"],
    ):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    script = ("--hf-token", "hf_abcdefghijkl")
    with starting(tmp_path, warm_environ) as start:
        options = ("--cpu", "--num-processes", "2", "--live")
        run = start(TRAIN + "# changed\n", *options, arguments=script, plain=False)
        for rank in range(2):
            run.wait_for(f"reached{rank}")
        found = seen(tmp_path, warm_environ, "watch", "--once")
        (tmp_path / "go").touch()
        assert run.end() == 0, run.stderr
    assert (found["state"], found["step"], found["bound_by"]) == ("running", 25, "straggler")
    assert (found["slowest"]["rank"], found["slowest"]["cause"]) == (1, "compute")
    assert found["ranks"][0]["peak_bytes"] > 2**20
    assert "note: --live needs a terminal" in run.stderr
    found = seen(tmp_path, warm_environ, "runs", "show")
    assert (found["state"], found["steps"], found["workers"]) == ("done", 30, 2)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert found["revision"] == f"{head.stdout.strip()}-dirty"
    assert set(found["versions"]) == {"fsdplaunch", "torch", "python"}
    assert found["command"] == ["t.py", "--hf-token", "***"]
    assert found["checkpoints"] == [str(tmp_path / "ckpt/checkpoint-25")]
    assert found["config"]["num_processes"] == {"value": 2, "from": "command line"}
