"""Scale the gradients of losses that are no means over equal shares, where the global batch is kept.

Gradients are averaged over ranks. A sum over the batch needs N times that; a mean over a count of its own on each
rank, such as its tokens that are no padding, needs the rank's part of all that is counted.
"""

from collections.abc import Callable
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist

from fsdplaunch.runtime import messages
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.model.loss_graph import BatchReduction, batch_reductions
from fsdplaunch.runtime.auto.model.loss_plan import ReductionPlan, facts_of, plan_reduction
from fsdplaunch.runtime.auto.model.row_mixing import (
    compares_rows,
    fixed_rows,
    inner_outputs,
    may_compare_rows,
    outputs_of_models,
    penalises_on_meshes,
)
from fsdplaunch.runtime.auto.script_line import script_line
from fsdplaunch.runtime.collectives.rank_group import from_all
from fsdplaunch.runtime.torch_internals.graph_nodes import takes_partial_passes

WEIGHT = "_fsdplaunch_weight"
"""The attribute of a loss by which its value counts in the mean over ranks, where that is not equal."""
_SAME_PART = 1e-9
_Plans = list[ReductionPlan]


class LossScale:
    """One worker's losses.

    Attributes:
        plans: By the script's line and the loss's operations, what was found at the first backward.
    """

    def __init__(self, hook_context: HookContext) -> None:
        self.hook_context = hook_context
        self.reduction = hook_context.config.launch.loss_reduction
        self.plans: dict[Any, _Plans] = {}

    def apply(self, losses: list[torch.Tensor]) -> None:
        """Scale what the losses are reduced by.

        Collective at the first backward of a line of the script, and where one divides by what may be a count.

        Args:
            losses: What the script calls `backward` of.
        """
        for loss in losses:
            if loss.grad_fn is None or self.reduction == "mean":
                continue
            if self.reduction == "sum":
                self.hook_context.batches.loss_is_sum = True
                loss.grad_fn.register_prehook(_times(self.hook_context.data.size))
            else:
                self._scale(loss)

    def _scale(self, loss: torch.Tensor) -> None:
        context = self.hook_context
        found = batch_reductions(loss.grad_fn, context.batches.sizes, context.data.size)
        line = script_line()
        key = (line, tuple((each.name, len(each.shape), len(each.amounts)) for each in found))
        if key in self.plans:
            context.stop_marking()
        else:
            self.plans[key] = self._planned(line, loss, found)
        plans = self.plans[key]
        ranks = self._followed(line, plans, found)
        context.batches.loss_is_sum = bool(plans) and all(plan.need == "ranks" for plan in plans)
        parts = []
        for plan, reduction, amounts in zip(plans, found, ranks, strict=True):
            if plan.need == "ranks":
                reduction.node.register_prehook(_times(context.data.size))
            elif plan.need == "part":
                parts.append(plan.part(dist.get_rank(), amounts))
                reduction.node.register_prehook(_times(parts[-1]))
        if parts and len(parts) == len(found) and max(parts) - min(parts) < _SAME_PART:
            vars(loss)[WEIGHT] = parts[0]

    def _followed(self, line: str, plans: _Plans, found: list[BatchReduction]) -> list[list[tuple[float, ...]]]:
        """Return for each reduction what each rank divided it by, and let the plans follow. May be collective."""
        own = [value for plan, each in zip(plans, found, strict=True) for value in _amounts(plan, each)]
        every = self._gathered(own) if own else [[]] * self.hook_context.size
        begin, ranks = 0, []
        for plan, reduction in zip(plans, found, strict=True):
            end = begin + len(_amounts(plan, reduction))
            ranks.append([tuple(each[begin:end]) for each in every])
            begin = end
        news = [plan.follow(amounts) for plan, amounts in zip(plans, ranks, strict=True) if amounts[0]]
        if any(news):
            messages.say(f"{line}: each rank's mean is over a count of its own: gradients are weighted by it")
        return ranks

    def _gathered(self, own: list[float]) -> list[list[float]]:
        """Return the numbers of every rank. Collective, one small sum: torch's gathers of lists take longer."""
        context = self.hook_context
        table = torch.zeros(context.size, len(own), dtype=torch.float64)
        table[dist.get_rank()] = torch.tensor(own, dtype=torch.float64)
        table = table.to(context.device)
        dist.all_reduce(table)
        numbers: list[list[float]] = table.tolist()
        return numbers

    def _planned(self, line: str, loss: torch.Tensor, found: list[BatchReduction]) -> _Plans:
        """Decide what each reduction needs, from what it is on all ranks, and print it. Collective."""
        value = float(loss.detach().double().sum())
        facts = from_all((value, [facts_of(each) for each in found]))
        passes = self.hook_context.batches
        if not passes.shared_passes and len({fact[0] for fact in facts}) == 1:
            return [ReductionPlan("mean", (), (), set()) for _ in found]  # all ranks computed the same rows
        plans = []
        for index, each in enumerate(found):
            rows = each.shape[:1] and each.shape[0] in passes.sizes
            certain = bool(rows) or not passes.alike_passes
            plans.append(plan_reduction([fact[1][index] for fact in facts], each.amounts, certain=certain))
        self._report(line, found, plans)
        self._tell_mixing(line, loss, found)
        return plans

    def _tell_mixing(self, line: str, loss: torch.Tensor, found: list[BatchReduction]) -> None:
        """Print whether the loss is one of all rows together, of which this rank has a part. Collective."""
        rows = self.hook_context.batches.current
        hidden = penalises_on_meshes(loss)
        seen = takes_partial_passes(penalised_meshes=hidden)
        mixes = seen and compares_rows(loss, found, rows, outputs_of_models(loss))
        mixes = (seen and self._mixes_inside(loss, found, rows)) or mixes
        facts = from_all((mixes, fixed_rows(loss, rows)))
        if any(fact != (False, facts[0][1]) for fact in facts):
            messages.say(
                f"{line}: the loss compares rows of the batch with each other: each rank compares its own {rows}"
                " only, which is not what one process computes"
            )
        elif hidden and rows > 1 and may_compare_rows(loss, found, inside=False):
            messages.say(
                f"{line}: whether the loss compares rows of the batch with each other cannot be seen where a mesh"
                " has several axes and parameters are in the loss; one that does is not that of one process"
            )
        elif rows == 1 and may_compare_rows(loss, found, inside=bool(self.hook_context.inner_marks)):
            messages.say(
                f"{line}: each rank has one row of the batch: a loss that compares rows with each other would not"
                " be that of one process, and with one row it cannot be seen"
            )

    def _mixes_inside(self, loss: torch.Tensor, found: list[BatchReduction], rows: int) -> bool:
        """Return whether a model compares rows in its own forward. Collective.

        What its modules returned is of rows where ranks have different ones: positions and classes are alike.
        """
        inner = inner_outputs(loss, rows) if self.hook_context.inner_marks else []
        totals = from_all([total for _, total in inner])
        if any(len(each) != len(inner) for each in totals):
            return False
        differ = [len(set(each)) > 1 for each in zip(*totals, strict=True)]
        return compares_rows(loss, found, rows, list(compress((output for output, _ in inner), differ)))

    def _report(self, line: str, found: list[BatchReduction], plans: _Plans) -> None:
        unknown = [each.name for each, plan in zip(found, plans, strict=True) if plan.need == "unknown"]
        if any(plan.need == "ranks" for plan in plans):
            messages.say(f"{line}: the loss is a sum over the batch: its gradients are added up over ranks")
        if unknown or not found:
            what = ", ".join(dict.fromkeys(unknown)) or "its graph does not show it"
            messages.say(
                f"{line}: the loss is no plain sum or mean over the batch ({what}): gradients are averaged"
                " over ranks, which need not be those of one process (launch.loss_reduction sets it)"
            )


def _amounts(plan: ReductionPlan, reduction: BatchReduction) -> list[float]:
    """Return what a reduction was divided by, where that matters."""
    if plan.need == "unknown" or not plan.kinds:
        return []
    return [each.value for each in reduction.amounts]


def _times(factor: float) -> Callable[[Any], Any]:
    def scale(gradients: Any) -> Any:
        return tuple(None if gradient is None else _scaled(gradient, factor) for gradient in gradients)

    return scale


def _scaled(gradient: torch.Tensor, factor: float) -> torch.Tensor:
    """Return a gradient times a factor; zeros for 0, also where the rank divided by a count of 0."""
    return gradient * factor if factor else torch.zeros_like(gradient)
