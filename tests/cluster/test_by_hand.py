"""One command per machine, typed by hand: the machines find each other, run together and end together."""

import json
import sys
from pathlib import Path

from tests.cluster.lab import Lab, finish

CPU = ("--distributed-type", "MULTI_CPU", "--num-machines", "2")
TWO = (*CPU, "--nproc-per-node", "1", "--show-ranks", "all")


def result(folder: Path, part: str = "") -> dict:
    return json.loads((folder / "runs" / "latest" / part / "result.json").read_text())


def test_two_machines_without_numbers_or_names_sum_over_all_ranks_twice_when_one_fails(three: Lab, folder: Path):
    here = ("--nproc-per-node", "2", "--show-ranks", "all", "--max-restarts", "1", "sum.py", "a b", "$(id)")
    first = three.launch(1, *CPU, *here, cwd=folder)  # started on host1: that is machine 0
    line = first.stderr.readline() + first.stderr.readline()
    assert f"--set main_process_ip={three.address(1)} --set main_process_port=29500" in line
    poke(three, folder)
    there = ("--nproc-per-node", "1", "--main-process-ip", three.address(1), *here[2:])
    other = three.launch(0, *CPU, *there, cwd=folder, FAIL_ONCE="2")
    (code0, out0, err0), (code1, out1, err1) = finish(first), finish(other)
    assert (code0, code1) == (0, 0), err0 + err1
    # Machine 0's ranks come first, although its address sorts after the other's.
    assert [out0.count(f"rank {rank} of 3 on host1 sum 6.0 ['a b', '$(id)']") for rank in (0, 1)] == [2, 2]
    assert out1.count("rank 2 of 3 on host0 sum 6.0") == 2
    assert "3 on 2 nodes" in err0
    assert len(result(folder)["attempts"]) == 2
    assert result(folder)["exit_code"] == result(folder, "node1")["exit_code"] == 0


def poke(three: Lab, folder: Path) -> None:
    """A stranger comes to the meeting at host1, which takes no notice."""
    words = "import socket; s = socket.create_connection(('host1', 29500)); s.sendall(b'GET /\\n\\n'); s.recv(9)"
    assert finish(three.start(2, sys.executable, "-c", words, cwd=folder))[0] == 0


def test_static_rendezvous_numbers_machines_as_they_say(three: Lab, folder: Path):
    where = ("--main-process-ip", "host0", "--main-process-port", "29600", "--rdzv-backend", "static")
    common = (*CPU, *where, "--show-ranks", "all")
    two = (*common, "--nproc-per-node", "2", "sum.py")
    one = (*common, "--nproc-per-node", "1", "--machine-rank", "0", "sum.py")
    with three.as_debian_has_it():
        other = three.launch(1, *two, cwd=folder, FSDPLAUNCH_NODE_RANK="1")
        first = three.launch(0, *one, cwd=folder)
        (code0, out0, err0), (code1, out1, err1) = finish(first), finish(other)
    assert (code0, code1) == (0, 0), err0 + err1
    assert "rank 0 of 3 on host0 sum 6.0" in out0
    assert "rank 2 of 3 on host1 sum 6.0" in out1


def test_worker_that_fails_on_the_other_machine_is_the_cause_on_both(three: Lab, folder: Path):
    with three.as_debian_has_it():
        where = (*TWO, "--main-process-ip", "host0", "sum.py")
        runs = [three.launch(machine, *where, cwd=folder, FAIL="1") for machine in (0, 1)]
        (code0, _, err0), (code1, _, err1) = map(finish, runs)
    assert (code0, code1) == (1, 1), err0 + err1
    assert "rank 1 failed with exit code 1" in err0
    assert "on host1" in err0
    assert "ValueError: no such luck" in err0
    assert "node1/ranks/1/stderr.log" in err0
    assert "node 0 has the report" in err1
    assert result(folder)["failure"]["rank"] == result(folder, "node1")["failure"]["rank"] == 1
    assert "no such luck" in (folder / "runs" / "latest" / "node1" / "ranks" / "1" / "stderr.log").read_text()
    assert not list(folder.rglob("steps.json"))  # they share their files


STEPS = """
import time, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
weight = torch.nn.Parameter(torch.zeros(4))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(30):
    weight.grad = torch.ones(4)
    time.sleep(0.08 if dist.get_rank() == 1 else 0.01)
    dist.all_reduce(weight.grad)
    optimizer.step()
"""


def test_machine_0_sees_what_the_ranks_of_a_machine_do_with_which_it_shares_no_folder(three: Lab, folder: Path):
    for name in ("here", "there"):
        (folder / name).mkdir()
        (folder / name / "steps.py").write_text(STEPS)
    where, secret = (*TWO, "--main-process-ip", "host0", "steps.py"), {"FSDPLAUNCH_SECRET": "5" * 64}
    places = enumerate(("here", "there"))
    runs = [three.launch(machine, *where, cwd=folder / name, **secret) for machine, name in places]
    (code0, _, err0), (code1, _, err1) = map(finish, runs)
    assert (code0, code1) == (0, 0), err0 + err1
    assert (folder / "here/runs/latest/node1/steps.json").stat().st_mode & 0o777 == 0o600
    watch = [sys.executable, "-m", "fsdplaunch", "watch", "--once", "--json"]
    code, out, err = finish(three.start(0, *watch, cwd=folder / "here"))
    assert code == 0, err
    found = json.loads(out)
    assert (found["state"], found["step"], found["bound_by"]) == ("done", 30, "straggler")
    assert (found["slowest"]["rank"], found["slowest"]["cause"]) == (1, "compute")
    assert [row["rank"] for row in found["ranks"]] == [0, 1]
    assert 0.07 < found["ranks"][1]["step_seconds"] < 0.3
