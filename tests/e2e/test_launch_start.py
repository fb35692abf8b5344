"""What a start takes: imports are made once, before the fork, where no thread and no GPU is; and it is timed."""

import json
import os
from contextlib import suppress
from pathlib import Path

import pytest

COLD = True
# Preloaded last: what it finds is there before the fork.
BEFORE = """
import json, os, sys, torch
gpu, threads = torch.cuda.is_initialized(), len(os.listdir("/proc/self/task"))
with open("before.json", "w") as file:
    json.dump({"gpu": gpu, "threads": threads, "modules": [*sys.modules]}, file)
"""
REPORT = """
def report():
    with open("before.json") as file:
        before = {*json.load(file)["modules"], "looks"}
    made = {name for name in sys.modules if name.partition(".")[0] in ("torch", "fsdplaunch")} - before
    print("made", json.dumps(sorted(made)), flush=True)
"""
PLAIN = f"""
import json, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
{REPORT}
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1)).to("cpu")
optimizer = torch.optim.AdamW(model.parameters())
for batch, in DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=4):
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
torch.save(model.state_dict(), "model.pt")
report()
"""
PREPARED = f"""
import json, sys
import torch
import fsdplaunch
{REPORT}
model = torch.nn.Linear(4, 4)
model, optimizer = fsdplaunch.prepare(model, torch.optim.AdamW(model.parameters()))
model(torch.randn(2, 4)).sum().backward()
optimizer.step()
report()
"""
REPLICAS = f"""
import json, sys
import torch
{REPORT}
report()
"""
CASES = {
    "FSDP2": (PLAIN, "--launch.timing=true"),
    "global batch": (PLAIN, "--keep-global-batch"),
    "FSDP1": (PREPARED, "--fsdp-version", "1", "--fsdp-auto-wrap-policy", "NO_WRAP"),
    "replicas": (REPLICAS, "--distributed-type", "MULTI_CPU"),
}


def run_case(start, folder, script, *options):
    (folder / "looks.py").write_text(BEFORE)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    words = ("--use-cpu", "--num-processes", "2", "--launch.preload", "looks", *options)
    run = start(script, *words, plain=False, env={"PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
    run.end()
    return run


@pytest.fixture(scope="module")
def runs(side_by_side):
    return side_by_side(run_case, CASES)


@pytest.mark.parametrize("case", CASES)
def test_workers_import_nothing_that_could_be_imported_before_the_fork(runs, case):
    run = runs[case].result()
    assert run.code == 0, run.stderr
    before = json.loads((run.folder / "before.json").read_text())
    assert (before["gpu"], before["threads"]) == (False, 1)
    assert ("fsdplaunch.runtime.auto.install" in before["modules"]) == (case != "replicas")
    assert [run.log(rank).splitlines()[-1] for rank in (0, 1)] == ["made []", "made []"]


def test_the_parts_of_a_start_are_printed_and_in_the_result_where_they_are_asked_for(runs):
    run, other = runs["FSDP2"].result(), runs["global batch"].result()
    parts = run.json()["start"]
    assert list(parts) == ["plan", "agent", "torch", "imports", "fork", "group", "hooks", "script"]
    assert 0 < parts["plan"] < sum(parts.values()) < run.json()["seconds"] + parts["plan"]
    assert (
        f"the last worker's script started after {sum(parts.values()):.2f} s: plan {parts['plan']:.2f}, agent "
        in run.stderr
    )
    assert "the last worker's script started" not in other.stderr
    assert "start" not in other.json()


VARIABLES = """
import os, pathlib, sys
waiting = [
    each.parent.name
    for each in pathlib.Path("/proc").glob("[0-9]*/cmdline")
    if b"--plan-by=" in each.read_bytes() and b"MARK=caller" in (each.parent / "environ").read_bytes()
]
print(os.environ["MARK"], sys.flags.hash_randomization, len(waiting), flush=True)
"""


def test_the_interpreter_that_is_begun_while_the_run_is_planned_gets_its_variables_or_another_is_started(launch):
    options = ("--distributed-type", "MULTI_CPU", "--use-cpu", "--set", "launch.env.MARK=run")
    for seed, expected in (
        ("", "run 1 1"),
        ("0", "run 0 0"),
    ):  # of hashes, which an interpreter reads at its start
        seeded = ("--set", f"launch.env.PYTHONHASHSEED={seed}") if seed else ()
        run = launch(VARIABLES, *options, *seeded, plain=False, env={"MARK": "caller"})
        assert run.code == 0, run.stderr
        assert run.log(0).splitlines()[-1] == expected


def test_the_interpreter_that_is_begun_ends_where_nothing_starts(launch, tmp_path):
    run = launch("", "--num-processes", "0", plain=False, env={"MARK": str(tmp_path)})
    assert run.code == 2
    for found in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            assert f"MARK={tmp_path}".encode() not in found.read_bytes()
