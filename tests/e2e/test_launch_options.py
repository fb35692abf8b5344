"""Options and keys of launch that change how workers start, read back from the workers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdplaunch.agent.worker_spec import processors_for_ranks

SEEN = """
import json, os, sys, signal
with open("seen" + os.environ["RANK"] + ".json", "w") as file:
    json.dump({
        "env": {name: os.environ.get(name) for name in ("ROLE_NAME", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES",
                "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS")},
        "cpus": sorted(os.sched_getaffinity(0)), "torch": "torch" in sys.modules, "argv": sys.argv,
    }, file)
print("out", os.environ["RANK"])
print("err", os.environ["RANK"], file=sys.stderr)
"""


def seen(run, rank=0):
    return json.loads((run.folder / f"seen{rank}.json").read_text())


def test_torchruns_own_options_are_taken_as_written(launch):
    options = ["--standalone", "--nproc_per_node=3", "--nnodes", "1", "--rdzv-id=job7", "--role", "trainer"]
    options += ["--rdzv_conf", "read_timeout=20", "--monitor-interval", "0.05", "--max-restarts=0", "-t", "2:1"]
    options += ["-r", "0:2", "--shutdown-timeout", "5", "--signals-to-handle", "SIGTERM,SIGINT"]
    run = launch(SEEN, "--distributed-type", "MULTI_CPU", *options, plain=False)
    assert run.code == 0, run.stderr
    assert {name: seen(run, 2)["env"][name] for name in ("ROLE_NAME", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")} == {
        "ROLE_NAME": "trainer",
        "WORLD_SIZE": "3",
        "TORCHELASTIC_RUN_ID": "job7",
    }
    assert sorted(run.stdout.splitlines()) == ["[0] out 0", "[2] out 2"]
    assert not any(line.startswith(("err", "[0] err", "[2] err")) for line in run.stderr.splitlines())
    assert run.log(0, "stderr.log") == "err 0\n"


TAKEN = {
    "warm": ("--start-method=forkserver", "--numa-binding", "exclusive", "--event-log-handler", "console"),
    "fresh": ("--no-preload", "--numa-binding", "exclusive"),
    "virtual": ("--virtual-local-rank", "--use-cpu"),
}


def start_so(start, _folder, name):
    run = start(SEEN, *TAKEN[name], env={"CUDA_VISIBLE_DEVICES": "5,7"} if name == "virtual" else {})
    run.end()
    return run


@pytest.fixture(scope="module")
def taken(side_by_side):
    return side_by_side(start_so, {name: (name,) for name in TAKEN})


@pytest.mark.parametrize("way", ["warm", "fresh"])
def test_workers_start_fresh_where_that_is_asked_for_and_share_the_processors(taken, way):
    run = taken[way].result()
    assert run.code == 0, run.stderr
    assert seen(run)["torch"] is (way == "warm")
    all_of_them = sorted(os.sched_getaffinity(0))
    expected = processors_for_ranks("exclusive", ["", ""], allowed=all_of_them, root=Path("/"))
    assert [seen(run, rank)["cpus"] for rank in (0, 1)] == [cpus or all_of_them for cpus in expected]
    if way == "warm":
        assert '"name": "torchelastic.worker.status.SUCCEEDED"' in (run.dir / "agent.log").read_text()


def test_program_that_is_no_python_runs_with_the_workers_variables(start, tmp_path):
    script = tmp_path / "job.sh"
    script.write_text('#!/bin/sh\necho "$RANK of $WORLD_SIZE: $*"\n[ "$RANK" = 0 ] || exit 9\n')
    script.chmod(0o755)
    run = start(None, "--no-python", arguments=("./job.sh", "a b", "$HOME", "--", "-x"))
    assert run.end() == 9
    assert run.log(1) == "1 of 2: a b $HOME -- -x\n"
    assert "rank 1 failed with exit code 9" in run.stderr


def test_virtual_local_rank_gives_each_worker_its_own_gpu(taken):
    run = taken["virtual"].result()
    assert run.code == 0, run.stderr
    variables = [seen(run, rank)["env"] for rank in (0, 1)]
    own = [(env["LOCAL_RANK"], env["CUDA_VISIBLE_DEVICES"]) for env in variables]
    assert own == [("0", ""), ("0", "")]  # on the CPU none; tests/unit/agent/test_worker_spec.py has GPUs


def test_check_only_starts_nothing(start, tmp_path):
    run = start("print('ran')", "--check-only", "--json")
    assert run.end() == 0
    assert json.loads(run.stdout) == {"stage": "preflight", "exit_code": 0, "findings": []}
    (tmp_path / "t.py").write_text("def f(:\n")
    run = start(None, "--check-only", arguments=("t.py",))
    assert run.end() == 1
    assert run.stderr.splitlines()[0] == "error: t.py:1: invalid syntax: def f(:"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.py"]


def test_json_is_alone_on_stdout_and_tells_the_failure(launch):
    run = launch("import os\nprint('text')\nif os.environ['RANK'] == '1': raise KeyError('k')", "--json")
    result = json.loads(run.stdout)
    assert run.code == result["exit_code"] == 1
    assert result["stage"] == "run"
    assert (result["failure"]["rank"], result["failure"]["message"]) == (1, "KeyError: 'k'")
    assert "text" in run.stderr
    assert result["attempts"][0]["ranks"][1]["exit_code"] == 1


def test_printed_command_does_the_same_when_pasted(start, tmp_path):
    run = start(SEEN, "--dry-run", arguments=("x y", "$(id)", "'"))
    assert run.end() == 0
    assert not (tmp_path / "runs").exists()
    done = subprocess.run(["sh", "-c", run.stdout], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "out 0\n"
    assert seen(run, 1)["argv"] == ["t.py", "x y", "$(id)", "'"]


SAVES = """
import os, torch, fsdplaunch
assert os.environ["MINE"] == "v4lue"
model = fsdplaunch.prepare(torch.nn.Linear(4, 4))
fsdplaunch.save_checkpoint("ckpt", model=model)
"""


def test_values_of_own_variables_are_in_the_workers_environment_alone(start, tmp_path):
    (tmp_path / "fsdp.yaml").write_text(
        "use_cpu: true\nlaunch: {env: {MINE: v4lue}}\nfsdp_config: {fsdp_auto_wrap_policy: NO_WRAP}\n"
    )
    run = start(SAVES, plain=False)
    assert run.end() == 0, run.stderr
    (folder,) = {path.resolve() for path in (tmp_path / "runs").iterdir()} - {tmp_path / "runs/compared.json"}
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all((folder / name).stat().st_mode & 0o77 == 0 for name in ("plan.json", "config.yaml", "result.json"))
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name not in ("fsdp.yaml", "t.py")]
    assert tmp_path / "ckpt/fsdplaunch.json" in files
    assert [path for path in files if b"v4lue" in path.read_bytes()] == []
    for words in (
        "launch --dry-run --all t.py",
        "config show",
        "config show --origin",
        "config explain launch.env",
    ):
        command = [sys.executable, "-m", "fsdplaunch", *words.split()]
        shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
        assert "MINE" in shown.stdout
        assert "v4lue" not in shown.stdout + shown.stderr


PANEL = """
import os, signal, torch
import torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # rank 0 has time to say what it thinks happened

def step(number):
    if dist.get_rank() == 1:
        raise ValueError("no such batch: 7")
    dist.all_reduce(torch.ones(1))

step(3)
"""


def test_panel_is_the_only_thing_said_about_a_failure(launch):
    run = launch(PANEL)
    assert run.code == 1
    lines = run.stderr.splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("error: "))
    assert lines[head].startswith("error: rank 1 failed with exit code 1 after ")
    assert lines[head + 2 : head + 5] == [
        "  ValueError: no such batch: 7",
        "    t.py:13 in <module>   step(3)",
        '    t.py:10 in step   raise ValueError("no such batch: 7")',
    ]
    assert lines[-1].startswith("  log  runs/")
    assert "Traceback" not in run.stderr
    assert "Traceback" in run.log(0, "stderr.log")
    assert "Traceback" in run.log(1, "stderr.log")
    assert "\0" not in run.log(0, "stderr.log")
    assert len(lines) < 16
