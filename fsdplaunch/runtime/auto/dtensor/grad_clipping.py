"""Clip gradients by the norm of the full gradient.

Needed because torch's own returns a norm that only its methods for sharded tensors can read, and refuses models of
which some parameters are not sharded.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.tensor import DTensor
from torch.nn import utils
from torch.nn.utils import clip_grad

from fsdplaunch.runtime.api import gradients
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.patch import replaced


@contextmanager
def clipping_by_full_norm(hook_context: HookContext) -> Iterator[None]:
    """Clip sharded gradients by this package's functions, and any others by torch's."""

    def norm(original: Any) -> Any:
        def clip_grad_norm_(
            parameters: Any,
            max_norm: float,
            norm_type: float = 2.0,
            error_if_nonfinite: bool = False,
            foreach: bool | None = None,
        ) -> Any:
            params = gradients.listed(parameters)
            if not hook_context.ownership.ours or not any(isinstance(param, DTensor) for param in params):
                return original(params, max_norm, norm_type, error_if_nonfinite, foreach)
            return _finite(gradients.clip_grad_norm_(params, max_norm, norm_type), norm_type, error_if_nonfinite)

        return clip_grad_norm_

    def total(original: Any) -> Any:
        def get_total_norm(
            tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
        ) -> Any:
            given = gradients.listed(tensors)
            if not hook_context.ownership.ours or not any(isinstance(each, DTensor) for each in given):
                return original(given, norm_type, error_if_nonfinite, foreach)
            return _finite(gradients.total_norm(given, norm_type), norm_type, error_if_nonfinite)

        return get_total_norm

    def clip(original: Any) -> Any:
        def clip_grads_with_norm_(
            parameters: Any, max_norm: float, total_norm: Any, foreach: bool | None = None
        ) -> None:
            params = gradients.listed(parameters)
            if hook_context.ownership.ours and any(isinstance(param, DTensor) for param in params):
                gradients.clip_with_norm(params, max_norm, total_norm)
            else:
                original(params, max_norm, total_norm, foreach)

        return clip_grads_with_norm_

    def value(original: Any) -> Any:
        def clip_grad_value_(parameters: Any, clip_value: float, foreach: bool | None = None) -> None:
            params = gradients.listed(parameters)
            if hook_context.ownership.ours and any(isinstance(param, DTensor) for param in params):
                gradients.clip_grad_value_(params, clip_value)
            else:
                original(params, clip_value, foreach)

        return clip_grad_value_

    with (
        replaced(utils, "clip_grad_norm_", norm),
        replaced(clip_grad, "clip_grad_norm_", norm),
        replaced(utils, "clip_grad_value_", value),
        replaced(clip_grad, "clip_grad_value_", value),
        replaced(utils, "get_total_norm", total),
        replaced(clip_grad, "get_total_norm", total),
        replaced(utils, "clip_grads_with_norm_", clip),
        replaced(clip_grad, "clip_grads_with_norm_", clip),
    ):
        yield


def _finite(norm: Any, norm_type: float, required: bool) -> Any:
    if required and not norm.isfinite():
        msg = f"The total norm of order {norm_type} for gradients from `parameters` is non-finite"
        raise RuntimeError(msg)
    return norm
