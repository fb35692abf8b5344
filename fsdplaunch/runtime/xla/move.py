"""Move a model to PyTorch/XLA's devices. Needs no torch_xla."""

import torch
from torch import nn


def move_model(model: nn.Module, device: torch.device) -> None:
    """Move a model to a device of another kind, and keep parameters shared: torch makes new ones there.

    Args:
        model: In host memory.
        device: Where it goes.
    """
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    model.to(device)
    for first, *others in names.values():
        for name in others:
            home, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(home), leaf, model.get_parameter(first))
