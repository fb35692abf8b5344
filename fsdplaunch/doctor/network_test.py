"""The network test that every worker runs: is what all-reduce returns right, and how fast is it.

    fsdplaunch doctor --network

Runs in workers, under the launcher's own bootstrap, which has made the process group.
"""

import json
import os
import socket
import time
from pathlib import Path

import torch
import torch.distributed as dist

from fsdplaunch.run_dir import RUN_DIR
from fsdplaunch.runtime.collectives.rank_group import from_all

ANSWER = "network.json"
_SIZES = (1, 1023, 1 << 20)
"""Elements of the tensors whose sum is checked."""
_SUM_BYTES = 32 << 20
_REPEATS = 3


def run_network_test() -> None:
    """Test the connections; rank 0 writes what was found into the run's folder."""
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    use_cuda = torch.cuda.is_available() and "cuda" in str(dist.get_backend_config())
    device = torch.device("cuda", torch.cuda.current_device()) if use_cuda else torch.device("cpu")
    wrong = []
    for count in _SIZES:  # each holds its rank + 1 plus a pattern, exact in fp32
        pattern = torch.arange(count, device=device).remainder(251).to(torch.float32)
        value = pattern + (rank + 1)
        dist.all_reduce(value)
        if not torch.equal(value, pattern * world + world * (world + 1) / 2):
            wrong.append(count)
    times = []
    for _ in range(_REPEATS + 1):
        began = time.perf_counter()
        dist.all_reduce(torch.ones(_SUM_BYTES // 4, device=device))
        if use_cuda:
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    # The first warms up. A ring moves 2 (n - 1) / n of the tensor over each link.
    found = from_all({"host": socket.gethostname(), "wrong": wrong, "seconds": min(times[1:])})
    folder = os.environ.get(RUN_DIR)
    if rank == 0 and folder:
        answer = {
            "world": world,
            "backend": str(dist.get_backend(dist.group.WORLD)),
            "hosts": [each["host"] for each in found],
            "wrong": {str(rank): each["wrong"] for rank, each in enumerate(found) if each["wrong"]},
            "all_reduce": 2 * (world - 1) / world * _SUM_BYTES / max(each["seconds"] for each in found),
        }
        (Path(folder) / ANSWER).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    run_network_test()
