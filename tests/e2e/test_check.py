"""`fsdplaunch check`: a script with its own configuration on two CPU ranks; and the doctor's network test."""

import json
import re

SCRIPT = """
import sys, torch
from torch import nn
import fsdplaunch
torch.set_num_threads(1)
block = lambda: nn.Sequential(nn.Linear(16, 16), nn.ReLU())
model = nn.Sequential(*[block() for _ in range(3)], nn.Linear(16, 16))
model, optimizer = fsdplaunch.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.randn(4, 16)).pow(2).mean().backward()
    optimizer.step()
    print("step", step, flush=True)
    if len(sys.argv) > 2:
        raise ValueError("bad batch")
print("whole script", flush=True)
"""
CONFIG = """
distributed_type: FSDP
num_processes: 16
num_machines: 2
main_process_ip: node0
mixed_precision: bf16
fsdp_config:
  fsdp_version: 2
  fsdp_sharding_strategy: HYBRID_SHARD
  fsdp_activation_checkpointing: true
"""


def test_script_is_ended_after_its_steps_and_a_checkpoint_round_trip(fsdplaunch, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "fsdp.yaml").write_text(CONFIG)
    done = fsdplaunch("check", "--json", "--steps", "3", "train.py", "1000000")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["works"], found["steps"]) == (True, 3)
    assert found["checkpoint_bytes"] > 0
    assert "note: HYBRID_SHARD needs more than 2 workers: checked as FULL_SHARD" in done.stderr
    assert re.search(r"sharded Sequential: 3 x Sequential.*bf16", done.stderr)
    assert "fsdp.yaml works with train.py: 2 CPU workers, 3 steps" in done.stderr
    assert "was saved, read back and found equal" in done.stderr
    assert "whole script" not in done.stderr
    assert not list(tmp_path.glob("runs/*/rehearsal-checkpoint*"))


def test_script_that_fails_or_makes_no_step_is_shown_with_its_line_and_its_status(fsdplaunch, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = fsdplaunch("check", "--steps", "2", "train.py", "5", "fail")
    assert done.returncode == 1
    assert "ValueError: bad batch" in done.stderr
    assert "train.py:15 in <module>" in done.stderr
    assert "works with" not in done.stderr
    done = fsdplaunch("check", "train.py", "0")
    assert done.returncode == 1
    assert "error: train.py ended without an optimizer step" in done.stderr


def test_network_test_finds_right_sums(fsdplaunch):
    done = fsdplaunch(
        "doctor", "--network", "--no-torch", "--json", "--set", "num_processes=3", "--set", "use_cpu=true"
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["network"]["world"], found["network"]["wrong"]) == (3, {})
    (check,) = (check for check in found["checks"] if check["topic"] == "all-reduce")
    assert check["status"] == "ok"
    assert check["text"].startswith("correct on all 3 ranks")


PLAIN = """
import sys, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
rows = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
for x, y in torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True):
    if "never" in sys.argv:
        break
    loss = nn.functional.mse_loss(model(x), y, reduction=sys.argv[1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("loss", loss.item())
"""


def test_comparing_prints_a_table_and_launch_says_whether_this_script_was_compared(fsdplaunch, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(PLAIN)
    never = "compared with one process yet (fsdplaunch check --compare)"

    def said() -> list[str]:
        done = fsdplaunch("launch", "--cpu", "--workers-per-node", "2", "train.py", "mean")
        assert done.returncode == 0, done.stderr
        return re.findall(r"compared with one process.*", done.stderr)

    done = fsdplaunch("check", "--compare", "--steps", "3", "train.py", "mean")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split("  ")[:2] == ["step", "loss, one process"]
    assert [line.split()[0] for line in lines[1:4]] == ["1", "2", "3"]
    assert "equal: train.py computes the same over 2 workers as in one process" in lines
    assert re.search(r"3 steps: losses and gradients to .*, 4 parameters to \d\.\de-(0[6-9]|1\d)$", lines[-1])
    assert not list((tmp_path / "runs").glob(".*compare"))
    assert re.fullmatch(r"compared with one process: equal on \d{4}-\d\d-\d\d", *said())
    script.write_text(PLAIN + "\n")
    assert said() == [never]


def test_comparing_what_never_trains_is_an_error_before_workers_start(fsdplaunch, tmp_path):
    (tmp_path / "train.py").write_text(PLAIN)
    done = fsdplaunch("check", "train.py", "--compare", "never")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "error: train.py, in one process, ended without an optimizer step" in done.stderr
    assert not list((tmp_path / "runs").glob("2*"))
