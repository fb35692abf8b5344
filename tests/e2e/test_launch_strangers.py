"""Who listens during a run, and what those who do not belong to it can do: nothing."""

import contextlib
import random
import resource
import socket
import threading
import time
from pathlib import Path

from fsdplaunch.launch.coordination.network import listen
from scripts.campaigns.attack_classes.stores import descendants, listening, overwrite
from scripts.campaigns.attack_classes.strangers import KINDS

STEPS = 5
TRAINS = f"""
import os, sys, time
from pathlib import Path
import torch
rank = os.environ["RANK"]
def tell(name, text):  # not by open(), with which a script for one process writes on rank 0 alone
    place = os.open(name + rank, os.O_CREAT | os.O_WRONLY, 0o644)
    os.write(place, text.encode())
    os.close(place)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range({STEPS}):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if step == 1:
        tell("agent", Path(f"/proc/{{os.getppid()}}/stat").read_text().rpartition(")")[2].split()[1])
        tell("up", os.environ.get("FSDPLAUNCH_SECRET", "none"))
        while not Path("go").exists():
            time.sleep(0.05)
if rank == "1" and Path("fail").exists():
    sys.exit(7)
print("steps", step + 1)
"""
MOST_BYTES = 50e6


def peak_bytes(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * float(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


def come(port: int) -> list[socket.socket]:
    """Let eight strangers of different kinds come."""
    sockets = []
    for number, kind in enumerate(KINDS[:7] + KINDS[-2:-1]):
        sock = socket.create_connection(("127.0.0.1", port), timeout=5)
        sockets.append(sock)

        def act(kind=kind, sock=sock, number=number) -> None:
            with contextlib.suppress(OSError, ValueError):
                kind(sock, random.Random(number))

        threading.Thread(target=act, daemon=True).start()
    return sockets


def two_nodes(start, folder: Path):
    """Start a run on two nodes, one machine here, and wait until both train; return them and the port."""
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    words = ("--cpu", "--num-machines", "2", "--nproc-per-node", "1", "--main-process-ip", "127.0.0.1")
    words = (*words, "--main-process-port", str(port))
    nodes = [start(TRAINS, *words, plain=False), start(TRAINS, *words, "--machine-rank", "1", plain=False)]
    with contextlib.suppress(OSError):
        come(port)  # while they join
    told = [nodes[0].wait_for(f"up{rank}", 110) for rank in range(2)]
    assert told == ["none", "none"]  # the workers need no secret, and get none
    return nodes, port


def test_strangers_at_the_port_of_a_run_on_two_nodes_change_nothing(start, tmp_path):
    nodes, port = two_nodes(start, tmp_path)
    before = peak_bytes(nodes[0].pid)
    sockets = come(port)
    places = listening(descendants(nodes[0].pid))
    assert [place for place in places if place.startswith(("0.", "*", "[::]"))] == []
    time.sleep(1)
    grown = peak_bytes(nodes[0].pid) - before
    (tmp_path / "go").touch()
    assert [node.end() for node in nodes] == [0, 0], nodes[0].stderr + nodes[1].stderr
    assert f"steps {STEPS}" in nodes[0].stdout
    assert grown < MOST_BYTES
    for sock in sockets:
        sock.close()


def test_node_that_fails_is_a_failure_on_both_stranger_or_not(start, tmp_path):
    (tmp_path / "fail").touch()
    nodes, port = two_nodes(start, tmp_path)
    sockets = come(port)
    (tmp_path / "go").touch()
    assert [node.end() for node in nodes] == [7, 7], nodes[0].stderr + nodes[1].stderr
    for sock in sockets:
        sock.close()


def test_run_on_one_node_listens_on_loopback_and_outlives_its_overwritten_stores(start, tmp_path):
    fails_first = "import os, sys\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': sys.exit(3)\n"
    run = start(fails_first + TRAINS, "--cpu", "--num-processes", "3", "--max-restarts", "1", plain=False)
    run.wait_for("up2")
    agent = int((tmp_path / "agent2").read_text())  # no child of a launcher whose interpreter was warm
    places = listening(sorted({*descendants(run.pid), *descendants(agent)}))
    assert places
    assert all(place.startswith("127.0.0.1:") for place in places)
    assert (
        overwrite(places, tmp_path / "executed") == 1
    )  # the one for scripts that make a group themselves; gloo's sockets are none
    (tmp_path / "go").touch()
    assert run.end() == 0, run.stderr
    assert not (tmp_path / "executed").exists()


def test_limit_of_open_files_that_is_too_low_is_said_at_once(start):
    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))

    run = start("pass", preexec_fn=lower)
    assert run.end() == 3
    assert "a process here may open 16 files, and 2 workers need 80" in run.stderr
