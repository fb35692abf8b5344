"""One command per machine, typed by hand: the machines find each other, run together and end together."""

import json
import sys
import time
from pathlib import Path

from tests.cluster.lab import Lab, campaign, finish

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
    plan = json.loads((folder / "runs" / "latest" / "plan.json").read_text())
    assert "--rdzv-backend=static" in plan["argv"]


@campaign
def test_sharded_training_over_two_machines_writes_one_checkpoint(three: Lab, folder: Path):
    script = Path(__file__).parents[2] / "scripts" / "examples" / "train_lm.py"
    words = (
        "--use-cpu",
        "--nproc-per-node",
        "1",
        "--num-machines",
        "2",
        "--main-process-ip",
        "host0",
        str(script),
    )
    runs = [three.launch(k, *words, "--steps", "2", cwd=folder, OMP_NUM_THREADS="1") for k in (0, 1)]
    (code0, out0, err0), (code1, _, err1) = finish(runs[0], 100), finish(runs[1], 100)
    assert (code0, code1) == (0, 0), err0 + err1
    assert "evaluation loss after training" in out0
    parts = sorted(path.name for path in folder.rglob("*.distcp"))
    assert [name.partition("_0.")[0] for name in parts if name.startswith("__")].count("__1") > 0, parts


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


def both(three: Lab, folder: Path, one: tuple[str, ...], two: tuple[str, ...], seconds: float = 20):
    common = (*TWO, "--main-process-ip", "host0", "--rendezvous-timeout-seconds", "6")
    first = three.launch(0, *common, *one, cwd=folder)
    other = three.launch(1, *common, *two, cwd=folder)
    return finish(first, seconds), finish(other, seconds)


def test_missing_machine_is_named_within_the_time_that_was_set(three: Lab, folder: Path):
    where = (*TWO, "--main-process-ip", "host0", "--rendezvous-timeout-seconds", "1", "sum.py")
    started = time.monotonic()
    code, _, err = finish(three.launch(0, *where, cwd=folder))
    assert code == 3
    assert f"1 of 2 nodes came within 1 s: host0 ({three.address(0)}); missing: node 1" in err
    assert time.monotonic() - started < 5


def test_machines_that_differ_are_refused_on_both_with_every_difference(three: Lab, folder: Path):
    second = ("--max-restarts", "1", "--set", "launch.env.A=b", "sum.py", "--lr", "2")
    (code0, _, err0), (code1, _, err1) = both(three, folder, ("sum.py", "--lr", "1"), second)
    assert (code0, code1) == (3, 3), err0 + err1
    for err in (err0, err1):
        assert "launch.max_restarts is '1' there and left out on host0" in err
        assert "launch.env.A is '#" in err
        assert "sum.py --lr 2, and host0 sum.py --lr 1" in err


def test_machines_with_the_same_number_are_named_on_all(three: Lab, folder: Path):
    common = (*TWO, "--num-machines", "3", "--main-process-ip", "host0", "--rendezvous-timeout-seconds", "6")
    for number, last in ((1, (1, 2)), (0, (1,))):  # host1 cannot be machine 0: host0 has the address for that
        runs = [three.launch(0, *common, "sum.py", cwd=folder)]
        assert "node 0 waits" in runs[0].stderr.readline()
        runs += [three.launch(k, *common, "--machine-rank", str(number), "sum.py", cwd=folder) for k in last]
        if number == 0:
            runs.append(three.launch(2, *common, "sum.py", cwd=folder))
        for code, _, err in map(finish, runs):
            assert code == 3
            assert f"are both configured as node {number}" in err


def test_machine_0_that_does_not_answer_is_named_with_the_reason(three: Lab, folder: Path):
    listen = "import socket, time; s = socket.create_server(('', 29600)); print('up', flush=True); time.sleep(60)"
    squatter = three.start(0, sys.executable, "-c", listen, cwd=folder)
    squatter.stdout.readline()
    common = (*TWO, "--rendezvous-timeout-seconds", "1")
    elsewhere = {
        "host0:29500": "connection refused",
        "nosuchhost:29500": "the name is not known",
        "10.255.255.1:29500": "unreachable",
    }
    runs = {
        place: three.launch(1, *common, "--machine-rank", "1", "--rdzv-endpoint", place, "sum.py", cwd=folder)
        for place in (*elsewhere, "host0:29600")
    }
    held = three.launch(
        0, *common, "--main-process-ip", "host0", "--main-process-port", "29600", "sum.py", cwd=folder
    )
    ends = {place: finish(run) for place, run in runs.items()}
    code, _, err = finish(held)
    squatter.kill()
    squatter.communicate()
    assert [code for code, _, _ in ends.values()] == [3] * 4
    for place, why in elsewhere.items():
        assert f"node 0 could not be reached at {place} within 1 s" in ends[place][2]
        assert why in ends[place][2]
    assert "what listens at host0:29600 is not fsdplaunch launch" in ends["host0:29600"][2]
    assert code == 3
    assert f"in use by process {squatter.pid}" in err


def test_address_that_the_others_cannot_reach_is_named(three: Lab, folder: Path):
    (code0, _, err0), (code1, _, err1) = both(
        three, folder, ("sum.py",), ("--local-address", "127.0.0.1", "sum.py")
    )
    assert (code0, code1) == (3, 3)
    for err in (err0, err1):
        assert "cannot reach host1 (127.0.0.1): connection refused" in err
        assert "launch.network_interface" in err


def test_interface_that_is_not_there_is_refused_on_both_with_those_that_are(three: Lab, folder: Path):
    (code0, _, err0), (code1, _, err1) = both(three, folder, ("sum.py",), ("--network-interface", "ib0", "sum.py"))
    assert (code0, code1) == (3, 3), err0 + err1
    said = f"launch.network_interface is ib0, but this node (host1) has lo (127.0.0.1), eth0 ({three.address(1)})"
    assert f"host1 ({three.address(1)}) cannot start: {said}" in err0
    assert f"error: {said}" in err1
