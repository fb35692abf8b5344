"""How the nodes of a run find each other and their ranks, by their number. Run by scripts/bench/rendezvous."""

import argparse
import gc
import json
import os
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import protection
from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import create_rdzv_handler

from fsdplaunch.agent.elastic_agent import AgreedRendezvous
from fsdplaunch.config.resolve import resolve
from fsdplaunch.config.schema.config import Config
from fsdplaunch.launch.coordination import network
from fsdplaunch.launch.coordination.coordinator import Coordinator, JoinRequirements
from fsdplaunch.launch.coordination.join import SecretSource, config_texts
from fsdplaunch.launch.coordination.node_client import NodeClient
from fsdplaunch.launch.coordination.node_info import NodeInfo
from fsdplaunch.launch.coordination.run_control import JoinProgress

TEXTS = config_texts(resolve(Config(num_machines=2)))
SECRET = "5e" * 32
WORKERS = 8
HOST = "127.0.0.1"
PATIENCE = {"agreed": 300.0, "static": 300.0, "c10d": 60.0}
"""Seconds that each way gets before it is given up."""
_TCP_INFO_BYTES = struct.Struct("@120xQQ")
"""Where the kernel's tcp_info has the bytes that were acknowledged and received."""


@dataclass
class Outcome:
    """What one way took.

    Attributes:
        seconds: From the last arrival to the last node that knows its ranks.
        cpu: Of node 0's processors.
        sent: Bytes, by node 0.
        received: Bytes, by node 0.
    """

    seconds: float
    cpu: float
    sent: int
    received: int


def silent(_text: str) -> None:
    pass


def assign_ranks(rank: int, nodes: int, store: Any) -> None:
    """Have torch's agent find its workers' ranks in the store, as it does before it starts them."""
    spec = WorkerSpec(role="default", local_world_size=WORKERS, rdzv_handler=None, entrypoint="worker")
    agent = LocalElasticAgent(spec, logs_specs=DefaultLogsSpecs())
    workers = agent._assign_worker_ranks(store, rank, nodes, spec)
    found = [worker.global_rank for worker in workers]
    if found != list(range(rank * WORKERS, (rank + 1) * WORKERS)):
        raise SystemExit(f"node {rank} found its workers' ranks to be {found}")


def agreed(rank: int, nodes: int, ports: list[int], listener: socket.socket | None) -> None:
    """Join as the launchers do, and then meet as the agents do: what `fsdplaunch launch` does for fixed nodes."""
    probe = network.listen(HOST, 0)
    info = NodeInfo(
        **{"host": f"host{rank}", "address": HOST, "workers": WORKERS, "config": TEXTS, "rank": rank},
        **{"command": ("train.py",), "port": probe.getsockname()[1]},
    )
    progress = JoinProgress(say=silent)
    control: Coordinator | NodeClient
    if listener is not None:
        required = JoinRequirements(run_id="bench", least=nodes, most=nodes, seconds=300, secret=SECRET)
        control = Coordinator(listener, info, required, silent)
        assignment = control.gather(progress)
    else:
        source = SecretSource(SECRET, Path("/nonexistent/.join"))
        control = NodeClient(HOST, ports[0], secret=source, seconds=300, grace=1, tell=silent)
        control.connect(progress)
        assignment = control.join(info, progress)
    control.start()
    handler = AgreedRendezvous(
        **{"run_id": "bench", "rank": assignment.rank, "nodes": nodes, "secret": SECRET},
        place=(HOST, int(assignment.store.rpartition(":")[2])),
        held=assignment.held_port,
    )
    met = handler.next_rendezvous()
    assign_ranks(met.rank, met.world_size, met.store)
    _kept.extend((probe, control, handler, met))


def static(rank: int, nodes: int, ports: list[int], _listener: socket.socket | None) -> None:
    """Torch's static rendezvous alone, for which someone has numbered the nodes."""
    endpoint = f"{HOST}:{ports[1]}"
    parameters = RendezvousParameters("static", endpoint, "bench", nodes, nodes, rank=rank, timeout=300)
    handler = create_rdzv_handler(parameters)
    met = handler.next_rendezvous()
    assign_ranks(met.rank, met.world_size, met.store)
    _kept.extend((handler, met))


def c10d(rank: int, nodes: int, ports: list[int], _listener: socket.socket | None) -> None:
    """Torch's dynamic rendezvous alone."""
    limit = timedelta(seconds=60)
    store = TCPStore(HOST, ports[1], is_master=rank == 0, timeout=limit, wait_for_workers=False)
    backend = C10dRendezvousBackend(store, "bench")
    handler = DynamicRendezvousHandler.from_backend(
        "bench", store, backend, min_nodes=nodes, max_nodes=nodes, local_addr=HOST
    )
    met = handler.next_rendezvous()
    assign_ranks(met.rank, met.world_size, met.store)
    _kept.extend((handler, met))


WAYS: dict[str, Callable[[int, int, list[int], socket.socket | None], None]] = {
    "agreed": agreed,
    "static": static,
    "c10d": c10d,
}
_all_cpu: list[float] = []
_kept: list[Any] = []
"""What has to live until all are done."""


def tcp_bytes() -> tuple[int, int]:
    """Bytes sent and received over the TCP connections that this process has open."""
    sent = received = 0
    for entry in [path.name for path in Path("/proc/self/fd").iterdir()]:
        with suppress(OSError), socket.socket(fileno=os.dup(int(entry))) as end:
            if end.family in (socket.AF_INET, socket.AF_INET6):
                info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                acknowledged, got = _TCP_INFO_BYTES.unpack_from(info)
                sent, received = sent + acknowledged, received + got
    return sent, received


def node(way: str, rank: int, nodes: int, ports: list[int], listener: Any, gate: int, report: int) -> None:
    """Be one node: wait at the gate, arrive, and report when the ranks are known; then wait to be killed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what torch says of those that are killed before it
    os.read(gate, 1)
    before, arrived = time.process_time(), time.monotonic()
    try:
        WAYS[way](rank, nodes, ports, listener if rank == 0 else None)
        known = time.monotonic()
        cpu = time.process_time() - before
        sent, received = tcp_bytes() if rank == 0 else (0, 0)
        line = {"rank": rank, "arrived": arrived, "known": known, "cpu": cpu, "sent": sent, "received": received}
    except BaseException as error:
        line = {"rank": rank, "error": f"{type(error).__name__}: {error}"}
    os.write(report, (json.dumps(line) + "\n").encode())
    while True:
        signal.pause()


def _spare_port() -> int:
    """Return a free port that no connection of the nodes gets by itself."""
    for port in range(20000, 30000):
        with suppress(OSError), network.listen(HOST, port):
            return port
    msg = f"no port of {HOST} from 20000 to 30000 is free"
    raise OSError(msg)


def run(way: str, nodes: int) -> Outcome | str:
    """Fork the nodes, let them go at once, and gather what they report; a text says why there is nothing."""
    listener = network.listen(HOST, 0)
    ports = [listener.getsockname()[1], _spare_port()]
    gate, go = os.pipe()
    reading, report = os.pipe()
    children = []
    for rank in range(nodes):
        pid = os.fork()
        if pid == 0:
            os.close(go)
            os.close(reading)
            node(way, rank, nodes, ports, listener, gate, report)
        children.append(pid)
    listener.close()
    os.close(report)
    try:
        os.write(go, b"x" * nodes)
        return outcome(reading, nodes, PATIENCE[way])
    finally:
        for pid in reversed(children):  # node 0, which has the store, last
            os.kill(pid, signal.SIGKILL)
        used = [os.wait4(pid, 0)[2] for pid in children]
        _all_cpu[:] = [sum(one.ru_utime + one.ru_stime for one in used)]
        for end in (gate, go, reading):
            os.close(end)


def outcome(reading: int, nodes: int, patience: float) -> Outcome | str:
    """Read the reports of all nodes."""
    text, end = b"", time.monotonic() + patience
    os.set_blocking(reading, False)
    while (done := text.count(b"\n")) < nodes:
        if time.monotonic() > end:
            return f"> {patience:.0f} ({done} done)"
        with suppress(BlockingIOError):
            text += os.read(reading, 1 << 20)
        time.sleep(0.01)
    lines = [json.loads(line) for line in text.splitlines()]
    if failed := next((line["error"] for line in lines if "error" in line), None):
        return failed[:60]
    first = next(line for line in lines if line["rank"] == 0)
    seconds = max(line["known"] for line in lines) - max(line["arrived"] for line in lines)
    return Outcome(seconds, first["cpu"], first["sent"], first["received"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nodes", nargs="*", type=int, default=[2, 8, 32, 128])
    parser.add_argument("--only", default=",".join(WAYS))
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    protection.show()
    heads = ("seconds", "cpu s", "all cpu", "sent kB", "got kB")
    print(f"{'nodes':>5}  {'workers':>7}  {'way':8}", *(f"{head:>8}" for head in heads))
    gc.collect()
    gc.freeze()  # children share its memory
    for nodes in options.nodes or [2, 8, 32, 128]:
        for way in options.only.split(","):
            found = run(way, nodes)
            if isinstance(found, str):
                print(f"{nodes:5}  {nodes * WORKERS:7}  {way:8} {found}", flush=True)
                continue
            sizes = (found.sent / 1000, found.received / 1000)
            numbers = (f"{number:8.2f}" for number in (found.seconds, found.cpu, _all_cpu[0], *sizes))
            print(f"{nodes:5}  {nodes * WORKERS:7}  {way:8}", *numbers, flush=True)


if __name__ == "__main__":
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    main()
    sys.stdout.flush()
