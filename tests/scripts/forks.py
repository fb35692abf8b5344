"""A process that has the libraries loaded, and forks one child for each run of a script: plain, or one per rank.

    python -m tests.scripts.forks     one JSON request per line on stdin, one JSON answer per line on stdout

Libraries take seconds to import and the scripts less than one to run. A rank's child enters where a launched
worker does, at the bootstrap's `main`, and leaves behind what its parameters are at the end.
"""

import gc
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from fsdplaunch.agent.forked_process import renew_streams

FACTS = "facts.json"


def serve() -> None:
    import torch._dynamo.backends.registry
    import torch._functorch.aot_autograd
    import torch._inductor.pattern_matcher  # noqa: F401
    import transformers  # noqa: F401
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: F401

    import fsdplaunch.runtime.api.prepare
    import fsdplaunch.runtime.auto.install  # noqa: F401

    gc.collect()
    gc.freeze()  # as in a launch's fork server: children would look through all that was imported, and so copy it
    for line in sys.stdin:
        request = json.loads(line)
        ranks = request["ranks"]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        children = [_fork(request, rank, port) for rank in range(ranks or 1)]
        print(json.dumps(_wait(children, request["timeout"])), flush=True)


def _fork(request: dict[str, Any], rank: int, port: int) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        folder = Path(request["folder"])
        logs = Path(request["logs"])
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(logs / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
        os.environ.update(request["env"])
        renew_streams()  # as a worker's: without a buffer, which a script's own stream need not flush
        import torch

        torch.set_num_threads(1)
        argv = [request["script"], *request["arguments"]]
        if request["ranks"]:
            _tell_ranks(rank, request["ranks"], port)
        ours = request["ranks"] and not request["torchrun"]
        status = _rank(argv, rank, logs) if ours else _plain(argv)
    except BaseException:
        traceback.print_exc()
    finally:
        _leave(status)


def _leave(status: int) -> NoReturn:
    """End this child, whatever happens: it must never go on as the server. Output that is lost is a failure."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):  # full, or closed by the script: python's own status for that
        status = status or 120
    finally:
        os._exit(status)


def _plain(argv: list[str]) -> int:
    sys.argv = argv
    sys.path[0] = str(Path(argv[0]).parent)
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as leaving:
        return int(leaving.code or 0)
    return 0


def _tell_ranks(rank: int, size: int, port: int) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")


def _rank(argv: list[str], rank: int, logs: Path) -> int:
    import atexit

    from fsdplaunch.runtime.bootstrap import main

    status = 0
    try:
        main(argv)
    except SystemExit as leaving:
        status = int(leaving.code or 0)
    if status == 0:
        (logs / f"{rank}.{FACTS}").write_text(json.dumps(_parameters()))
        atexit._run_exitfuncs()
    return status


def _parameters() -> list[dict[str, Any]]:
    """Return what every parameter of every model of the program is on this rank."""
    from torch.distributed.tensor import DTensor

    from fsdplaunch.runtime.inspection import named_parameters
    from fsdplaunch.runtime.sharding.registry import _models

    return [
        {
            "model": type(model).__name__.removeprefix("FSDP"),
            "name": name,
            "sharded": isinstance(param, DTensor),
            "numel": param.numel(),
            "local": param.to_local().numel() if isinstance(param, DTensor) else param.numel(),
        }
        for model in list(_models)
        for name, param in named_parameters(model)
    ]


def _wait(children: list[int], timeout: float) -> list[int]:
    deadline = time.monotonic() + timeout
    left = dict(enumerate(children))
    codes = [0] * len(children)
    while left:
        for rank, child in list(left.items()):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                codes[rank] = os.waitstatus_to_exitcode(status)
                del left[rank]
                if codes[rank]:
                    deadline = min(deadline, time.monotonic() + 5)
        if left and time.monotonic() > deadline:
            for child in left.values():
                os.kill(child, signal.SIGKILL)
        time.sleep(0.005)
    return codes


if __name__ == "__main__":
    serve()
