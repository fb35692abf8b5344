"""The network test that every worker runs: is what all-reduce returns right, and how fast is each pair of ranks.

    fsdplaunch doctor --network

Runs in workers, under the launcher's own bootstrap, which has made the process group.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdplaunch.config.environment import RUN_DIR
from fsdplaunch.runtime.collectives.rank_group import from_all

ANSWER = "network.json"
_SIZES = (1, 1023, 1 << 20)
"""Elements of the tensors whose sum is checked."""
_PAIR_BYTES = 8 << 20
_SUM_BYTES = 32 << 20
_REPEATS = 3
_MOST_FOR_ALL_PAIRS = 16
"""Ranks up to which every pair is measured; above, neighbours, and the first ranks of all nodes."""


def run_network_test() -> None:
    """Test the connections; rank 0 writes what was found into the run's folder."""
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    use_cuda = torch.cuda.is_available() and "cuda" in str(dist.get_backend_config())
    device = torch.device("cuda", torch.cuda.current_device()) if use_cuda else torch.device("cpu")
    hosts = from_all(socket.gethostname())
    wrong = [count for count in _SIZES if not sum_is_right(count, device)]
    together = _timed(lambda: dist.all_reduce(torch.ones(_SUM_BYTES // 4, device=device)), device)
    seconds: dict[str, float] = {}
    for first, second in pairs_to_measure(hosts):
        dist.barrier()
        if rank in (first, second):
            peer = second if rank == first else first
            swap = partial(_exchange, peer, first=rank == first, device=device)
            seconds[f"{first}-{second}"] = _timed(swap, device)
    found = from_all({"wrong": wrong, "pairs": seconds, "together": together})
    if rank != 0:
        return
    pairs: dict[str, float] = {}
    for answer in found:
        for name, took in answer["pairs"].items():
            pairs[name] = max(pairs.get(name, 0.0), took)
    answer = {
        "world": world,
        "backend": str(dist.get_backend(dist.group.WORLD)),
        "hosts": hosts,
        "wrong": {str(rank): each["wrong"] for rank, each in enumerate(found) if each["wrong"]},
        # Both ways: twice the message per pair. A ring moves 2 (n - 1) / n of the tensor over each link.
        "pairs": {name: 2 * _PAIR_BYTES / took for name, took in pairs.items()},
        "all_reduce": 2 * (world - 1) / world * _SUM_BYTES / max(each["together"] for each in found),
    }
    if folder := os.environ.get(RUN_DIR):
        (Path(folder) / ANSWER).write_text(json.dumps(answer), encoding="utf-8")


def sum_is_right(count: int, device: torch.device) -> bool:
    """Return whether all ranks' tensors add up: each holds its rank + 1 plus a pattern, exact in fp32."""
    rank, world = dist.get_rank(), dist.get_world_size()
    pattern = torch.arange(count, device=device).remainder(251).to(torch.float32)
    value = pattern + (rank + 1)
    dist.all_reduce(value)
    expected = pattern * world + world * (world + 1) / 2
    return bool(torch.equal(value, expected))


def pairs_to_measure(hosts: list[str]) -> Iterator[tuple[int, int]]:
    """Yield the pairs of ranks to measure; `hosts` has the node of each rank."""
    world = len(hosts)
    if world <= _MOST_FOR_ALL_PAIRS:
        yield from combinations(range(world), 2)
        return
    leaders = [hosts.index(host) for host in dict.fromkeys(hosts)]
    neighbours = [(rank, rank + 1) for rank in range(world - 1)]
    yield from sorted({*neighbours, *combinations(leaders, 2)})


def _exchange(peer: int, *, first: bool, device: torch.device) -> None:
    """Send one message there and one back."""
    message = torch.ones(_PAIR_BYTES // 4, device=device)
    if first:
        dist.send(message, peer)
        dist.recv(message, peer)
    else:
        dist.recv(message, peer)
        dist.send(message, peer)


def _timed(act: Callable[[], Any], device: torch.device) -> float:
    """Return the shortest of some times, after one that warms up."""
    times = []
    for _ in range(_REPEATS + 1):
        began = time.perf_counter()
        act()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times[1:])


if __name__ == "__main__":
    run_network_test()
