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
            total = gradients.clip_grad_norm_(params, max_norm, norm_type)
            if error_if_nonfinite and not total.isfinite():
                msg = f"The total norm of order {norm_type} for gradients from `parameters` is non-finite"
                raise RuntimeError(msg)
            return total

        return clip_grad_norm_

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
    ):
        yield
