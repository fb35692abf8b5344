"""Tell where each rank's rows are padded to the longest of its own, which one process pads to the batch's.

Needed because a model may compute with the padding: a mean over all times, the last state of a recurrent layer.
A batch that has a mask, or the lengths, is taken for one whose padding counts for nothing.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from fsdplaunch.runtime import messages
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.script_line import script_line
from fsdplaunch.runtime.torch_internals.held_tensors import tensors_held
from fsdplaunch.runtime.torch_internals.tensors import tree_leaves

_BACKWARDS = 3
"""Before so many first ones ranks compare what they have noted."""


def note_padding(batch: Any, hook_context: HookContext) -> None:
    """Note how long the rows of a batch are that a collate function of the script's own has made.

    Args:
        batch: As the loader gives it, this rank's share.
        hook_context: This worker's.
    """
    batches = hook_context.batches
    if batches.backwards >= _BACKWARDS:
        return
    tensors = list(tensors_held(batch))
    shapes = list(_row_shapes(tensors, batches.sizes))
    longest = max((length for _, length in shapes), default=0)
    if shapes and not _has_mask(tensors, shapes) and not _has_lengths(batch, batches.sizes, longest):
        batches.lengths.setdefault(script_line(), longest)


def tell_padding(lengths: Sequence[dict[str, int]], hook_context: HookContext) -> None:
    """Print where rows are not as long on all ranks.

    Args:
        lengths: What each rank has noted, by the line that reads the batch.
        hook_context: This worker's.
    """
    for line in lengths[0]:
        found = [each.get(line, 0) for each in lengths]
        if len(set(found)) > 1 and f"padding {line}" not in hook_context.printed:
            hook_context.printed.add(f"padding {line}")
            messages.say(
                f"{line}: rows are padded to the longest of each rank's own"
                f" ({' and '.join(map(str, dict.fromkeys(found)))} here): what is computed with the padding, as a"
                " mean over the times or a last state, is not that of one process; where it is masked, it is"
            )


def _row_shapes(tensors: list[torch.Tensor], sizes: Collection[int]) -> Iterator[tuple[int, int]]:
    """Yield rows and length of what has both, the times first or second."""
    for each in tensors:
        if each.dim() > 1 and each.shape[0] in sizes:
            yield int(each.shape[0]), int(each.shape[1])
        elif each.dim() > 1 and each.shape[1] in sizes:
            yield int(each.shape[1]), int(each.shape[0])


def _has_mask(tensors: list[torch.Tensor], shapes: list[tuple[int, int]]) -> bool:
    flat = (each for each in tensors if each.dim() == 2 and not each.is_complex())  # noqa: PLR2004
    fitting = (each for each in flat if tuple(each.shape) in shapes or tuple(each.shape[::-1]) in shapes)
    return any(bool(((each == 0) | (each == 1)).all()) for each in fitting)


def _has_lengths(batch: Any, sizes: Collection[int], longest: int) -> bool:
    """Return whether a batch has one whole number per row of which the largest is its length."""
    held = (each for each in tensors_held(batch) if each.dim() == 1 and not each.is_floating_point())
    if any(len(each) in sizes and int(each.max()) == longest for each in held):
        return True
    numbers = [each for each in tree_leaves(batch) if type(each) is int]
    return len(numbers) in sizes and max(numbers) == longest
