"""Give a loader the sampler that divides its batches."""

from typing import Any

from torch.utils.data import BatchSampler, IterableDataset

from fsdplaunch.runtime import messages
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.data.samplers import FullBatches, RankBatches, RankItems
from fsdplaunch.runtime.data.data_loader import set_attributes
from fsdplaunch.runtime.script_line import script_line


def fit(loader: Any, hook_context: HookContext) -> None:
    """Give a loader the sampler that divides its batches, in place, before its first reading.

    Args:
        loader: As the script made it.
        hook_context: This worker's.

    """
    batches = loader.batch_sampler
    if isinstance(loader.dataset, IterableDataset):
        return
    if batches is None:
        set_attributes(loader, sampler=RankItems(loader.sampler, hook_context))
        if not hook_context.keeps_batch:
            messages.say(f"{script_line()}: the loader makes no batches, so ranks take turns at its items")
    elif type(batches) is BatchSampler:
        set_attributes(loader, batch_sampler=RankBatches(batches, hook_context))
    elif repeated := _repeated(batches):
        setattr(batches, repeated, RankBatches(getattr(batches, repeated), hook_context))
    else:
        how = "each is divided" if hook_context.keeps_batch else "ranks take turns"
        messages.say(f"{type(batches).__name__}: rank 0 draws its batches, {how}")
        set_attributes(loader, batch_sampler=FullBatches(batches, hook_context))


def _repeated(batches: Any) -> str:
    """Return which attribute has torch's batches, of what repeats them without end, as in YOLOv5's loaders.

    Such a loader's length is that of the batches within.
    """
    endless = not hasattr(type(batches), "__len__")
    held = vars(batches).items() if endless and hasattr(batches, "__dict__") else ()
    return next((name for name, each in held if type(each) is BatchSampler), "")
