"""Tell what a script computes of its batch's rows beside the loss's graph, of which each rank has its own rows.

Needed because a loss's graph shows what has gradients only: which rows are the hardest ones, what they are
normalised by, and the queues and banks that they are written into are those of all rows in one process.
"""

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch

from fsdplaunch.runtime import messages
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.data.padded_rows import tell_padding
from fsdplaunch.runtime.auto.data.row_means import is_row_mean, marking_row_means
from fsdplaunch.runtime.auto.data.row_order import is_between_reads
from fsdplaunch.runtime.auto.losses.first_batches.program import is_used
from fsdplaunch.runtime.collectives.rank_group import from_all
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.script_line import script_line
from fsdplaunch.runtime.torch_internals.tensors import is_function_transforms

_RANKING = ("topk", "sort", "argsort", "msort", "kthvalue", "median", "nanmedian", "quantile", "nanquantile")
_SPREAD = ("std", "var", "std_mean", "var_mean")
_RANKED_MEANS = ("topk", "sort", "argsort", "msort")
_WRITING = ("index_copy_", "index_add_", "index_put_", "scatter_", "scatter_add_")
_COMPARED = (1, 2, 3, 10, 100)
"""The backward passes at which ranks compare what they have noted: a script may begin with some of it later."""
_RANKED = "rows of the batch are ranked: each rank ranks its own rows only"
_MEANS = "means over the batch's rows are ranked: each rank ranks those of its own rows only"
_SPREADS = "the spread of the batch's rows is computed: each rank computes that of its own rows only"
_WRITTEN = "rows of the batch are written into a tensor that is kept: each rank writes its own rows only"
_JOINED = "rows of the batch are joined to a tensor of others: each rank joins its own rows only"
_DISTANT = "distances between rows of the batch are computed: each rank has those between its own rows only"
Found = torch.Tensor | None
"""What there is to be compared over ranks."""


@contextmanager
def telling_row_statistics(hook_context: HookContext) -> Iterator[None]:
    """Look at functions that rank rows, compute their spread, write or join them, until ranks have compared it."""
    if not hook_context.keeps_batch or hook_context.data.size == 1:
        yield
        return
    looks: tuple[tuple[tuple[str, ...], Callable[..., Found], str], ...] = (
        (_RANKING, _ranked, _RANKED),
        (_RANKED_MEANS, _ranked_means, _MEANS),
        (_SPREAD, _spread, _SPREADS),
        ((*_WRITING, "__setitem__"), _written, _WRITTEN),
        (("cat", "concat"), _joined, _JOINED),
        (("pdist",), _distant, _DISTANT),
    )
    with ExitStack() as stack:
        stack.enter_context(marking_row_means(hook_context))
        for names, look, sentence in looks:
            for owner in (torch, torch.Tensor, torch.nn.functional):
                for name in names:
                    if hasattr(owner, name):
                        stack.enter_context(replaced(owner, name, _noting(hook_context, look, sentence)))
        yield


def tell_noted(hook_context: HookContext) -> None:
    """Print what ranks have noted that is not the same on all of them. Collective, before some backward passes."""
    batches = hook_context.batches
    _leave_out_reported(hook_context)
    if batches.backwards + 1 not in _COMPARED:
        return
    facts = from_all((batches.noted, batches.lengths))
    ranks: list[dict[str, float]] = [noted for noted, _ in facts]
    batches.noted, batches.lengths = {}, {}
    tell_padding([lengths for _, lengths in facts], hook_context)
    for text in dict.fromkeys(text for each in ranks for text in each):
        if not _are_alike([each.get(text, math.inf) for each in ranks]) and text not in hook_context.printed:
            hook_context.printed.add(text)
            messages.say_unequal(f"{text}, which is not what one process computes")


def _leave_out_reported(hook_context: HookContext) -> None:
    """Forget, for good, numbers of the rows that nothing is computed with: a quantile that is printed."""
    batches, calls = hook_context.batches, hook_context.recorder.calls
    for text, made_by in batches.reported.items():
        if not any(call is None or is_used(call, calls) for call in made_by):
            batches.noted.pop(text, None)
            hook_context.printed.add(text)
    batches.reported.clear()


def _are_alike(values: list[float]) -> bool:
    return all(math.isclose(value, values[0], rel_tol=1e-5, abs_tol=1e-12) for value in values)


def _noting(hook_context: HookContext, look: Callable[..., Found], sentence: str) -> Callable[[Any], Any]:
    """Return what makes a function that notes what it is given, once a line, while that is still compared."""
    batches = hook_context.batches

    def make(original: Any) -> Any:
        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not batches.sizes or batches.backwards >= _COMPARED[-1]:
                return original(*args, **kwargs)
            found = look(batches.sizes, *args, **kwargs)
            if found is not None and _trains(hook_context):
                text = f"{script_line()}: {sentence}"
                if text not in batches.noted and text not in hook_context.printed:
                    batches.noted[text] = float(found.detach().double().nan_to_num().sum())
                    batches.reported[text] = []
                return _reporting(hook_context, text, original(*args, **kwargs))
            return original(*args, **kwargs)

        return call

    return make


def _reporting(context: HookContext, text: str, result: Any) -> Any:
    """Return what a function has returned, and remember the call if that is one number, which may be printed."""
    if text in context.batches.reported:
        number = isinstance(result, torch.Tensor) and result.numel() == 1 and result.is_floating_point()
        context.batches.reported[text].append(context.recorder.call_of(result) if number else None)
    return result


def _trains(context: HookContext) -> bool:
    """Return whether the script has a training batch before it, of which it may compute without gradients."""
    trains = any(model.training for model in list(context.models))
    return is_between_reads(context) and not context.batches.complete and trains


def _is_plain(value: Any) -> bool:
    return type(value) is torch.Tensor and value.is_floating_point() and not is_function_transforms(value)


def _has_rows(sizes: Collection[int], value: Any) -> bool:
    return _is_plain(value) and value.dim() > 0 and value.size(0) in sizes


def _has_gradients(tensors: Collection[torch.Tensor]) -> bool:
    """Return whether what is computed is in a graph, which may be that of the loss."""
    return torch.is_grad_enabled() and any(each.requires_grad for each in tensors)


def _distant(sizes: Collection[int], value: Any = None, *_: Any, **__: Any) -> Found:
    """Return rows whose distances from each other are taken; two of them have one, which a loss need not show."""
    return value if _has_rows(sizes, value) else None


def _ranked(sizes: Collection[int], value: Any = None, *args: Any, **kwargs: Any) -> Found:
    """Return rows that are ranked along their first dimension: where there are more, it has to be given."""
    value = kwargs.get("input", value)
    if not _has_rows(sizes, value):
        return None
    given = [kwargs["dim"]] if "dim" in kwargs else [arg for arg in args if type(arg) is int][-1:]
    return value if value.dim() == 1 or given == [0] else None


def _ranked_means(_sizes: Collection[int], value: Any = None, *_: Any, **kwargs: Any) -> Found:
    """Return means over rows that are ranked, for a choice by them, which no gradients show."""
    value = kwargs.get("input", value)
    return value if is_row_mean(value) else None


def _spread(sizes: Collection[int], value: Any = None, *args: Any, **kwargs: Any) -> Found:
    """Return rows without gradients over which a spread is computed; a loss's graph shows the others."""
    value = kwargs.get("input", value)
    if not _has_rows(sizes, value) or _has_gradients([value]):
        return None
    dims = kwargs.get("dim", args[0] if args and type(args[0]) is not bool else None)
    dims = tuple(dims) if isinstance(dims, list | tuple) else (dims,)
    return value if None in dims or 0 in dims or value.dim() == 1 else None


def _written(sizes: Collection[int], kept: Any, *args: Any, **_: Any) -> Found:
    """Return a sum of rows, or of their places, that are written without gradients into what has no such rows."""
    if (
        not _is_plain(kept)
        or kept.requires_grad
        or any(n in sizes for n in kept.shape[: 1 if 1 in sizes else None])
    ):
        return None
    given = [each for arg in args for each in (arg if isinstance(arg, list | tuple) else [arg])]
    tensors = [each for each in given if type(each) is torch.Tensor and not is_function_transforms(each)]
    if _has_gradients(tensors):
        return None
    rows = [
        each for each in tensors if each.dim() and any(n in sizes for n in each.shape[: 1 if 1 in sizes else 2])
    ]
    return torch.stack([each.detach().double().nan_to_num().sum() for each in rows]) if rows else None


def _joined(sizes: Collection[int], tensors: Any = (), dim: Any = 0, **_: Any) -> Found:
    """Return rows without gradients that are joined along their dimension to what has as many of no batch."""
    if dim != 0 or not isinstance(tensors, list | tuple) or not all(_is_plain(each) for each in tensors):
        return None
    known: list[torch.Tensor] = [each for each in tensors if each.dim() in (1, 2) and each.size(0) in sizes]
    if not known or len(known) == len(tensors) or _has_gradients(tensors):
        return None
    return known[0]
