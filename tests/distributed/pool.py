"""Processes that stay alive over many tests and form one gloo process group per world size."""

import gc
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PRELOAD = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch._dynamo.backends.registry",
    "torch._functorch.aot_autograd",
    "torch._inductor.pattern_matcher",
    "fsdplaunch.runtime.bootstrap",
    "fsdplaunch.runtime.saving.save_load",
    "fsdplaunch.runtime.api.prepare",
    "fsdplaunch.runtime.auto.install",
    "fsdplaunch.runtime.compat",
    "accelerate",
    "transformers.models.llama.modeling_llama",
    "peft",
]
"""What each rank would import by itself, some of it in seconds; one that is not installed is left out."""
GRACE_SECONDS = 5.0


class RankError(AssertionError):
    """A function raised on at least one rank; the text holds every rank's traceback."""


class RankPool:
    """`size` ranks that run functions together. A function must be importable by name."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._workers: list[tuple[Any, Connection]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(
        self, function: Callable[..., Any], *args: Any, env: Mapping[str, str] | None = None, timeout: float = 90.0
    ) -> list[Any]:
        """Call `function(*args)` on every rank at once and return the results by rank.

        Args:
            function: A module-level function of an importable module.
            args: Picklable.
            env: Variables that hold during the call.
            timeout: Seconds until the ranks count as hung; they are killed and started anew for the next call.
        """
        self.begin(function, *args, env=env)
        return self.wait(timeout)

    def begin(self, function: Callable[..., Any], *args: Any, env: Mapping[str, str] | None = None) -> None:
        """Call `function(*args)` on every rank at once; `wait` returns the results."""
        if not self._workers:
            self._start()
        for _, pipe in self._workers:
            pipe.send((function, args, dict(env or {})))

    def wait(self, timeout: float = 90.0) -> list[Any]:
        """The results, by rank, of the call that was begun."""
        answers = self._collect(time.monotonic() + timeout)
        failed = {rank: answer for rank, answer in answers.items() if answer[0] != "done"}
        if failed:
            self.stop()  # some ranks may be in a collective that the others will never join
            raise RankError("\n".join(f"rank {rank} {kind}:\n{text}" for rank, (kind, text) in failed.items()))
        return [answers[rank][1] for rank in range(self.size)]

    def pids(self) -> list[int]:
        """The ranks' processes."""
        return [process.pid for process, _ in self._workers]

    def threads(self) -> int:
        """How many threads a rank has: each group a test made leaves one, awake a hundred times a second."""
        return max((len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in self.pids()), default=0)

    def _collect(self, deadline: float) -> dict[int, tuple[str, Any]]:
        pipes = {pipe: rank for rank, (_, pipe) in enumerate(self._workers)}
        answers: dict[int, tuple[str, Any]] = {}
        while pipes and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(pipes), timeout=left):
                rank = pipes.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    answers[rank] = ("died", f"exit code {self._workers[rank][0].exitcode}")
                if answers[rank][0] != "done":
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return answers | dict.fromkeys(pipes.values(), ("hung", "no answer in time"))

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._folder = tempfile.TemporaryDirectory(prefix="rank-pool-")
        store = Path(self._folder.name) / "store"
        for rank in range(self.size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, str(store), theirs))
            process.start()
            theirs.close()
            self._workers.append((process, mine))

    def stop(self) -> None:
        """Kill the ranks; the next call starts new ones."""
        for process, pipe in self._workers:
            process.kill()
            process.join()
            pipe.close()
        self._workers = []
        if self._folder is not None:
            self._folder.cleanup()


def _serve(rank: int, size: int, store: str, pipe: Connection) -> None:
    """A rank's life: join the group, then run what comes in."""
    import torch
    import torch.distributed as dist

    gc.freeze()  # what the libraries made is not garbage, and to look through it copies it into each rank
    multiprocessing.set_start_method(None, force=True)  # Python's own, as in a script; a rank would take over ours
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=limit)
    while True:
        try:
            function, args, env = pipe.recv()
        except EOFError:
            return
        pipe.send(_answer(function, args, env))


def _answer(function: Callable[..., Any], args: tuple[Any, ...], env: dict[str, str]) -> tuple[str, Any]:
    from fsdplaunch.runtime.plugin import ambient_plugin

    before = dict(os.environ)
    os.environ.update(env)
    ambient_plugin.cache_clear()
    try:
        return "done", function(*args)
    except BaseException:
        return "raised", traceback.format_exc()
    finally:
        sys.stderr.flush()
        os.environ.clear()
        os.environ.update(before)
