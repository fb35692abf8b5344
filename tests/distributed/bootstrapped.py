"""Workers that enter at the bootstrap as launched ones do, forked from a process that has torch imported."""

import multiprocessing
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.distributed.pool import PRELOAD


@dataclass(frozen=True, slots=True)
class Ended:
    """How the workers of a script ended: exit codes by rank, and what all of them wrote."""

    codes: list[int | None]
    stdout: str
    stderr: str


def forked_workers(script: str, *, cwd: Path, ranks: int = 2, timeout: float = 60.0, **env: str) -> Ended:
    """Run a script on every rank.

    Args:
        script: Its file, in `cwd`.
        cwd: The workers' folder; their output is kept in it.
        ranks: How many.
        timeout: Seconds until those that are left are killed.
        env: Further variables.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), **env}
    started = []
    for rank in range(ranks):
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        variables = common | {name: str(value) for name, value in places.items()}
        started.append(context.Process(target=_work, args=(script, str(cwd), variables)))
        started[-1].start()
    for process in started:
        process.join(timeout)
        process.kill()
        process.join()
    texts = ["".join((cwd / f"{rank}.{name}").read_text() for rank in range(ranks)) for name in ("out", "err")]
    return Ended([process.exitcode for process in started], *texts)


def _work(script: str, folder: str, variables: Mapping[str, str]) -> None:
    os.chdir(folder)
    for name in [name for name in os.environ if name.startswith(("FSDP", "ACCELERATE"))]:
        del os.environ[name]
    os.environ.update(variables)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{variables['RANK']}.{name}", os.O_WRONLY | os.O_CREAT, 0o644), number)
    sys.stdin.close()
    import torch

    from fsdplaunch.runtime.bootstrap import main

    torch.set_num_threads(1)
    main([script])
