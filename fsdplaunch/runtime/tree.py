"""Put one module in the place of another, wherever a model holds it."""

from torch import nn


def replace_modules(root: nn.Module, new_for: dict[nn.Module, nn.Module]) -> None:
    """Exchange modules below `root` for others; one that is held in several places is exchanged in all."""
    places = [
        (parent, name, child)
        for parent in root.modules()
        for name, child in parent._modules.items()
        if child is not None and child in new_for
    ]
    for parent, name, child in places:
        parent._modules[name] = new_for[child]
