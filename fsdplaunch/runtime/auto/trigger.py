"""When a model is sharded for its script: as it is moved to the device, compiled, or given to an optimizer.

The first of these is the last moment at which the whole model need not be on any one device, and the first at
which it is complete.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fsdplaunch.runtime.auto.adopt import adopt
from fsdplaunch.runtime.auto.job import Job
from fsdplaunch.runtime.auto.patching import replaced
from fsdplaunch.runtime.names import unwrapped
from fsdplaunch.runtime.shard import is_sharded
from fsdplaunch.runtime.torch_internals import parse_move


def is_due(module: nn.Module, device: torch.device | None, job: Job) -> bool:
    """Whether moving a module to a device is the moment to shard it.

    It is for a whole model that has something to train and goes to the kind of device this worker computes on. It
    is not for a part of a model, nor while a larger module that will hold it is being built.
    """
    if device is None or device.type != job.device.type or is_sharded(module):
        return False
    if not any(param.requires_grad for param in module.parameters()):
        return False
    return not _inside_a_constructor() and job.births.is_root(unwrapped(module))


def _inside_a_constructor() -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        maker = (
            frame.f_locals.get(code.co_varnames[0]) if code.co_name == "__init__" and code.co_varnames else None
        )
        if isinstance(maker, nn.Module):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


@contextmanager
def sharding_on_move(job: Job) -> Iterator[None]:
    """Shard a model that is moved to the device, before it is: it must not land there whole."""

    def shard_then_move(original: Any) -> Any:
        def to(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            device, dtype = parse_move(args, kwargs)
            if is_due(self, device, job) and job.ownership.claim(f"moves {type(self).__name__} to {device}"):
                if dtype is not None:
                    original(self, dtype)
                adopt(unwrapped(self), job, what=f"moves it to {device}")
            return original(self, *args, **kwargs)

        return to

    def shard_then_cuda(original: Any) -> Any:
        def cuda(self: nn.Module, device: Any = None) -> Any:
            if is_due(self, torch.device("cuda"), job) and job.ownership.claim(f"moves {type(self).__name__}"):
                adopt(unwrapped(self), job, what="moves it to the GPU")
            return original(self, device)

        return cuda

    with replaced(nn.Module, "to", shard_then_move), replaced(nn.Module, "cuda", shard_then_cuda):
        yield


@contextmanager
def sharding_on_compile(job: Job) -> Iterator[None]:
    """Shard a model before torch.compile traces it whole."""

    def shard_then_compile(original: Any) -> Any:
        def compile_(model: Any = None, *args: Any, **kwargs: Any) -> Any:
            due = isinstance(model, nn.Module) and is_due(model, job.device, job)
            if due and job.ownership.claim(f"compiles {type(model).__name__}"):
                adopt(unwrapped(model), job, what="compiles it")
            return original(model, *args, **kwargs)

        return compile_

    with replaced(torch, "compile", shard_then_compile):
        yield


@contextmanager
def building_in_host_memory(job: Job) -> Iterator[None]:
    """Give a model without storage its storage in host memory: on the device it would be whole."""

    def empty_on_host(original: Any) -> Any:
        def to_empty(self: nn.Module, *, device: Any, recurse: bool = True) -> Any:
            due = job.device.type == "cuda" and device is not None and is_due(self, torch.device(device), job)
            if due and job.ownership.claim(f"gives {type(self).__name__} storage"):
                device = "cpu"
            return original(self, device=device, recurse=recurse)

        return to_empty

    with replaced(nn.Module, "to_empty", empty_on_host):
        yield
