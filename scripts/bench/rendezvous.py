"""How meeting, plan and torch's rendezvous grow with the number of machines. Run by scripts/bench/rendezvous."""

import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from fsdplaunch.config.resolve import resolve
from fsdplaunch.config.schema import Config
from fsdplaunch.launch.cluster import network
from fsdplaunch.launch.cluster.greeting import Greeting
from fsdplaunch.launch.cluster.group import Counter
from fsdplaunch.launch.cluster.guest import Guest
from fsdplaunch.launch.cluster.host import Host
from fsdplaunch.launch.cluster.meeting import config_texts
from fsdplaunch.launch.cluster.reception import Terms
from fsdplaunch.launch.plan import Machine, Target, build_plan

TEXTS = config_texts(resolve(Config(num_machines=2)))
WORKERS = 8
PATIENCE = 60
"""Seconds that torch's rendezvous gets; its threads share one interpreter here, which real agents do not."""


def silent(_text: str) -> None:
    pass


def greeting(number: int, beacon: network.Beacon) -> Greeting:
    return Greeting(
        host=f"host{number}",
        address="127.0.0.1",
        workers=WORKERS,
        config=TEXTS,
        command=("train.py",),
        probe=(beacon.port, beacon.word),
    )


def meet(count: int) -> tuple[float, float]:
    """Seconds and processor seconds until every one of `count` launchers may start."""
    listener = network.listen("127.0.0.1", 0)
    port = int(listener.getsockname()[1])
    beacons = [network.Beacon("127.0.0.1") for _ in range(count)]
    terms = Terms(run_id="bench", least=count, most=count, seconds=60, store_port=port + 1)
    host = Host(listener, greeting(0, beacons[0]), terms, silent)
    done: list[Any] = []

    def come(number: int) -> None:
        guest = Guest("127.0.0.1", port, seconds=60, grace=1, tell=silent)
        guest.connect(Counter(say=silent))
        done.append(guest.join(greeting(number, beacons[number]), Counter(say=silent)))

    threads = [threading.Thread(target=come, args=(number,)) for number in range(1, count)]
    start, cpu = time.monotonic(), time.process_time()
    for thread in threads:
        thread.start()
    host.gather(Counter(say=silent))
    for thread in threads:
        thread.join()
    spent = time.monotonic() - start, time.process_time() - cpu
    ranks = sorted(agreement.rank for agreement in done)
    if ranks != list(range(1, count)):
        raise SystemExit(f"the machines were numbered {ranks}")
    host.close()
    for beacon in beacons:
        beacon.close()
    return spent


def plan(count: int) -> float:
    """Seconds to make one machine's plan of a run on `count` machines."""
    config = resolve(Config(num_machines=count, machine_rank=0, main_process_ip="10.0.0.1", use_cpu=True))
    machine = Machine(gpus=0, cpus=64, environ=dict(os.environ))
    start = time.monotonic()
    build_plan(config, machine=machine, target=Target(name="train.py"), run_id="bench", run_dir=Path("/nowhere"))
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
