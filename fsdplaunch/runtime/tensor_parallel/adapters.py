"""Layers that have adapters around them, as PEFT puts them there: what is split where a plan splits the layer.

A plan names the layer, and in its place stands a module that holds it and the small matrices beside it.
"""

from collections.abc import Iterator

from torch import nn

from fsdplaunch.errors import ShardingError
from fsdplaunch.name_lists import listed
from fsdplaunch.runtime.sharding.blocks import class_name
from fsdplaunch.runtime.tensor_parallel.styles import Style

_BASE, _FIRST, _SECOND = "base_layer", "lora_A", "lora_B"
_FULL = ("lora_embedding_A", "lora_embedding_B")
"""Of an embedding's adapters: they get all ids and add to its full output."""
_SUMMED = "replicated_with_grad_allreduce"


def adapted_layers(module: nn.Module, style: Style, name: str, style_name: str) -> dict[nn.Module, str] | None:
    """Return the layers that are split instead of a module that holds adapters, each with the name of its style.

    Args:
        module: What a plan names.
        style: How its layer is split.
        name: Of the module, for errors.
        style_name: Of the style.

    Returns:
        None for a module without adapters, and for styles that split no parameters.

    Raises:
        ShardingError: The adapters are of a kind of which it is not known how they are split.
    """
    if not style.splits:
        return None
    original, trained = _child(module, "original_module"), _child(module, "modules_to_save")
    if original is not None and trained is not None:
        return dict.fromkeys((original, *trained.children()), style_name)
    base = _child(module, _BASE)
    if base is None:
        return None
    _check_kind(module, name)
    return {base: style_name} | dict(_beside(module, style, style_name))


def layer_name(name: str) -> str:
    """Return what a layer is called by the model that has no adapters."""
    return name.removesuffix(f".{_BASE}")


def _child(module: nn.Module, name: str) -> nn.Module | None:
    child = dict(module.named_children()).get(name)
    return child if isinstance(child, nn.Module) else None


def _check_kind(module: nn.Module, name: str) -> None:
    held = dict.fromkeys(each.partition(".")[0] for each, _ in module.named_parameters())
    others = [each for each in held if each not in (_BASE, _FIRST, _SECOND, *_FULL)]
    if others:
        msg = f"ranks (tp_size) cannot split the adapters of {name}: {class_name(module)} has {listed(others, 3)}"
        raise ShardingError(msg, hint="use plain LoRA, or leave the layer out of sharding.tensor_parallel_plan")


def _beside(module: nn.Module, style: Style, style_name: str) -> Iterator[tuple[nn.Module, str]]:
    """Yield the small matrices that meet activations of which each rank has a part.

    Beside split outputs that is the second, which adds to them; beside split inputs the first. The other one is
    full; where neither the layer's inputs nor its outputs are exchanged, its gradients are summands.
    """
    by_outputs = style.weights == "outputs"
    if not by_outputs and style.weights != "inputs":
        return
    outside = style.leave if by_outputs else style.enter
    if outside is not None:  # in full on both sides of the layer, and so for its adapters
        return
    split, full = (_SECOND, _FIRST) if by_outputs else (_FIRST, _SECOND)
    for each in _adapters(module, split):
        yield each, style_name
    if style.enter is None and style.leave is None:
        for each in _adapters(module, full):
            yield each, _SUMMED


def _adapters(module: nn.Module, which: str) -> list[nn.Module]:
    held = _child(module, which)
    return [] if held is None else list(held.children())
