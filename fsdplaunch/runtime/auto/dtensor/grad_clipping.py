"""Clip gradients by the norm of the full gradient.

Needed because torch's own returns a norm that only its methods for sharded tensors can read, and refuses models of
which some parameters are not sharded or are split over more ranks than others.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch.distributed.tensor import DTensor
from torch.nn import utils
from torch.nn.utils import clip_grad

from fsdplaunch.runtime.api import gradients
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.ddp.forward import average_local_gradients
from fsdplaunch.runtime.compat.import_hook import once_imported
from fsdplaunch.runtime.patch import replaced

Ours = Callable[[list[Any]], bool]
"""Whether among these there are shards that the launcher has made for the script."""


@contextmanager
def clipping_by_full_norm(hook_context: HookContext) -> Iterator[None]:
    """Clip sharded gradients by this package's functions, and any others by torch's."""

    def ours(tensors: list[Any]) -> bool:
        return bool(hook_context.ownership.ours) and any(isinstance(tensor, DTensor) for tensor in tensors)

    functions = {
        "clip_grad_norm_": _clip_norm,
        "clip_grad_value_": _clip_value,
        "get_total_norm": _total_norm,
        "clip_grads_with_norm_": _clip_with_norm,
    }
    with ExitStack() as stack:
        for name, make in functions.items():
            for owner in (utils, clip_grad):
                stack.enter_context(replaced(owner, name, partial(make, ours)))
        clip_norm = utils.clip_grad_norm_
        once_imported("torch_xla", lambda _: setattr(utils, "clip_grad_norm_", clip_norm))  # it puts its own there
        yield


def _clip_norm(ours: Ours, original: Any) -> Any:
    def clip_grad_norm_(
        parameters: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Any:
        params = gradients.listed(parameters)
        if not ours(params):
            return original(params, max_norm, norm_type, error_if_nonfinite, foreach)
        average_local_gradients(params)
        norm = gradients.clip_grad_norm_(params, max_norm, norm_type)
        return _finite(norm, norm_type) if error_if_nonfinite else norm

    ours_as_torchs: Any = clip_grad_norm_
    ours_as_torchs.__signature__ = inspect.signature(original)  # by which torch_xla knows it
    return ours_as_torchs


def _clip_value(ours: Ours, original: Any) -> Any:
    def clip_grad_value_(parameters: Any, clip_value: float, foreach: bool | None = None) -> None:
        params = gradients.listed(parameters)
        if ours(params):
            average_local_gradients(params)
            gradients.clip_grad_value_(params, clip_value)
        else:
            original(params, clip_value, foreach)

    return clip_grad_value_


def _total_norm(ours: Ours, original: Any) -> Any:
    def get_total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Any:
        given = gradients.listed(tensors)
        if not ours(given):
            return original(given, norm_type, error_if_nonfinite, foreach)
        norm = gradients.total_norm(given, norm_type)
        return _finite(norm, norm_type) if error_if_nonfinite else norm

    return get_total_norm


def _clip_with_norm(ours: Ours, original: Any) -> Any:
    def clip_grads_with_norm_(
        parameters: Any, max_norm: float, total_norm: Any, foreach: bool | None = None
    ) -> None:
        params = gradients.listed(parameters)
        if ours(params):
            gradients.clip_with_norm(params, max_norm, total_norm)
        else:
            original(params, max_norm, total_norm, foreach)

    return clip_grads_with_norm_


def _finite(norm: Any, norm_type: float) -> Any:
    if not norm.isfinite():
        msg = f"The total norm of order {norm_type} for gradients from `parameters` is non-finite"
        raise RuntimeError(msg)
    return norm
