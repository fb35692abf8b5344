"""Tell that transformers' Trainer multiplies a loss by the number of ranks that its model has not made for that.

With `average_tokens_across_devices`, its default, the Trainer gives a model the number of labels of all ranks, by
which it is to divide its sum, and multiplies the loss by the number of ranks, to whose average gradients come. It
takes every model whose `forward` has `**kwargs` for one that does. Many do not (sequence classification of BERT in
transformers 5): their mean over the rank's rows is multiplied, and gradients are larger than in one process.
"""

import functools
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fsdplaunch.runtime import messages
from fsdplaunch.runtime.script_line import script_line
from fsdplaunch.runtime.sharding.blocks import class_name

_COPIES = (torch.Tensor.to, torch.Tensor.detach, torch.Tensor.clone)
_LOOKS = (torch.is_floating_point, torch.Tensor.is_floating_point, torch.is_tensor, torch.Tensor.size)
"""What FSDP does with each tensor that a model is given; nothing is computed with it."""


class _Reads(TorchFunctionMode):
    """Whether something is computed with a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self._same = [tensor]
        self.found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = (*args, *(kwargs or {}).values())
        if any(value is known for value in given for known in self._same):
            if func in _COPIES:
                self._same.append(result)
            elif func not in _LOOKS and getattr(func, "__name__", "") != "__get__":
                self.found = True
        return result


def watch_loss(trainer: Any) -> None:
    """Look, at a Trainer's first loss, whether its model divides it by the number that it is given for that.

    Args:
        trainer: The module `transformers.trainer`.
    """
    kind = trainer.Trainer
    compute = kind.compute_loss

    @functools.wraps(compute)
    def compute_loss(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        count = kwargs.get("num_items_in_batch")
        if not isinstance(count, torch.Tensor) or not _multiplies(self) or hasattr(self, "_fsdplaunch_looked"):
            return compute(self, model, *args, **kwargs)
        self._fsdplaunch_looked = True
        with _Reads(count) as reads:
            loss = compute(self, model, *args, **kwargs)
        if not reads.found:
            _tell(self)
        return loss

    kind.compute_loss = compute_loss


def _multiplies(trainer: Any) -> bool:
    """Return whether the Trainer multiplies losses; one of a compiled model is not looked into."""
    ranks = trainer.accelerator.num_processes > 1 and getattr(trainer.args, "average_tokens_across_devices", False)
    made_for = trainer.model_accepts_loss_kwargs or getattr(trainer, "compute_loss_func", None)
    return bool(ranks and made_for and not getattr(trainer.args, "torch_compile", False))


def _tell(trainer: Any) -> None:
    ranks = trainer.accelerator.num_processes
    model = class_name(trainer.accelerator.unwrap_model(trainer.model))
    messages.say_unequal(
        f"{script_line()}: the Trainer multiplies the loss by the {ranks} ranks, for the model to divide it by the"
        f" labels of all of them, which {model} does not: gradients are {ranks} times those of one process;"
        " --average_tokens_across_devices False trains as one process does"
    )
