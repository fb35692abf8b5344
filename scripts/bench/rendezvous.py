"""How meeting, plan and torch's rendezvous grow with the number of machines. Run by scripts/bench/rendezvous."""

import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from fsdplaunch.config.resolve import resolve
from fsdplaunch.config.schema.config import Config
from fsdplaunch.launch.coordination import network
from fsdplaunch.launch.coordination.coordinator import Coordinator
from fsdplaunch.launch.coordination.handshake import CoordinatorHandshake, NodeHandshake
from fsdplaunch.launch.coordination.interfaces import JoinProgress
from fsdplaunch.launch.coordination.join import config_texts
from fsdplaunch.launch.coordination.node_client import NodeClient
from fsdplaunch.launch.coordination.node_info import NodeInfo
from fsdplaunch.launch.coordination.run_secrets import SecretSource
from fsdplaunch.launch.coordination.server import JoinRequirements
from fsdplaunch.launch.plan import LaunchTarget, NodeFacts, build_plan
from fsdplaunch.private_dir import make_private_dir, remove_private_dir

TEXTS = config_texts(resolve(Config(num_machines=2)))
WORKERS = 8
SECRET = "ab" * 32
PATIENCE = 60
"""Seconds that torch's rendezvous gets; its threads share one interpreter here, which real agents do not."""


def silent(_text: str) -> None:
    pass


def node_info(number: int, reachability_probe: network.ReachabilityProbe) -> NodeInfo:
    return NodeInfo(
        host=f"host{number}",
        address="127.0.0.1",
        workers=WORKERS,
        config=TEXTS,
        command=("train.py",),
        probe=(reachability_probe.port, reachability_probe.word),
    )


def meet(count: int) -> tuple[float, float]:
    """Seconds and processor seconds until every one of `count` launchers may start."""
    listener = network.listen("127.0.0.1", 0)
    port = int(listener.getsockname()[1])
    reachability_probes = [network.ReachabilityProbe("127.0.0.1") for _ in range(count)]
    requirements = JoinRequirements(
        run_id="bench", least=count, most=count, seconds=60, store_port=port + 1, secret=SECRET
    )
    host = Coordinator(listener, node_info(0, reachability_probes[0]), requirements, silent)
    done: list[Any] = []

    def come(number: int) -> None:
        source = SecretSource(SECRET, Path("/nonexistent"))
        client = NodeClient("127.0.0.1", port, secret=source, seconds=60, grace=1, tell=silent)
        client.connect(JoinProgress(say=silent))
        done.append(client.join(node_info(number, reachability_probes[number]), JoinProgress(say=silent)))

    threads = [threading.Thread(target=come, args=(number,)) for number in range(1, count)]
    start, cpu = time.monotonic(), time.process_time()
    for thread in threads:
        thread.start()
    host.gather(JoinProgress(say=silent))
    for thread in threads:
        thread.join()
    spent = time.monotonic() - start, time.process_time() - cpu
    ranks = sorted(assignment.rank for assignment in done)
    if ranks != list(range(1, count)):
        raise SystemExit(f"the machines were numbered {ranks}")
    host.close()
    for reachability_probe in reachability_probes:
        reachability_probe.close()
    return spent


def protect() -> dict[str, float]:
    """Seconds that the protection of a run costs a start, by what is done; each the best of 20."""
    folder = Path(tempfile.mkdtemp())
    shared = folder / ".join"

    def exchange() -> None:
        source = SecretSource("", shared)
        source.offer()
        SecretSource("", shared).wait()
        source.withdraw()

    def shake() -> None:
        coordinator, node = CoordinatorHandshake(SECRET), NodeHandshake(SECRET)
        accepted, answer = coordinator.answer(node.reply(coordinator.opening))
        if not (accepted and node.is_accepted(answer)):
            raise SystemExit("the handshake failed")

    def hide() -> None:
        environ: dict[str, str] = {}
        make_private_dir(environ)
        remove_private_dir(environ)

    def lines() -> None:
        """Send the handshake's three lines over loopback: what a connection takes longer than without."""
        one, other = socket.socketpair()
        for _ in range(3):
            one.sendall(b"x" * 100)
            other.recv(256)
            one, other = other, one
        one.close()
        other.close()

    actions = {"make the secret, leave it in a file, find it": exchange, "prove it, both sides": shake}
    actions |= {"three lines more on a connection": lines, "a private folder for a lone node": hide}
    try:
        return {name: best(lambda action=action: timed(action), 20) for name, action in actions.items()}
    finally:
        shutil.rmtree(folder)


def timed(action: Callable[[], None]) -> float:
    start = time.monotonic()
    action()
    return time.monotonic() - start


def plan(count: int) -> float:
    """Seconds to make one machine's plan of a run on `count` machines."""
    config = resolve(Config(num_machines=count, machine_rank=0, main_process_ip="10.0.0.1", use_cpu=True))
    machine = NodeFacts(gpus=0, cpus=64, environ=dict(os.environ))
    start = time.monotonic()
    build_plan(
        config, node=machine, target=LaunchTarget(name="train.py"), run_id="bench", run_dir=Path("/nowhere")
    )
    return time.monotonic() - start


def rendezvous(count: int) -> float | None:
    """Seconds until torch's own rendezvous has let every one of `count` agents go; None when it takes too long."""
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    server = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False)

    def join() -> None:
        store = TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=60))
        backend = C10dRendezvousBackend(store, f"bench{count}")
        handler = DynamicRendezvousHandler.from_backend(
            f"bench{count}", store, backend, min_nodes=count, max_nodes=count, local_addr="127.0.0.1"
        )
        handler.next_rendezvous()
        handler._stop_heartbeats()

    threads = [threading.Thread(target=join, daemon=True) for _ in range(count)]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, start + PATIENCE - time.monotonic()))
    return None if any(thread.is_alive() for thread in threads) else time.monotonic() - start


def best(action: Callable[[], Any], times: int = 3) -> Any:
    return min(action() for _ in range(times))


def main(counts: list[int]) -> None:
    costs = protect()
    for name, cost in costs.items():
        print(f"{1000 * cost:8.2f} ms  {name}")
    print(f"{1000 * sum(costs.values()):8.2f} ms  in all: what a run's protection costs its start\n", flush=True)
    print(
        f"{'machines':>8}  {'workers':>7}  {'meeting s':>9}  {'of it CPU s':>11}  {'plan ms':>7}  {'torch s':>7}"
    )
    for count in counts:
        seconds, cpu = best(lambda count=count: meet(count))
        planned = best(lambda count=count: plan(count)) * 1000
        torch_seconds = rendezvous(count)
        last = f"> {PATIENCE}" if torch_seconds is None else f"{torch_seconds:.2f}"
        print(
            f"{count:8}  {count * WORKERS:7}  {seconds:9.2f}  {cpu:11.2f}  {planned:7.1f}  {last:>7}",
            flush=True,
        )


if __name__ == "__main__":
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    main([int(word) for word in sys.argv[1:]] or [2, 8, 32, 128])
    sys.stdout.flush()
    os._exit(0)  # threads of a rendezvous that was given up may still run
