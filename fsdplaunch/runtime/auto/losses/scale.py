"""Scale the gradients of losses that are no means over equal shares, where the global batch is kept.

Gradients are averaged over ranks. A sum over the batch needs N times that; a mean over a count of its own on each
rank, such as its tokens that are no padding, needs the rank's part of all that is counted.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
from torch.random import fork_rng

from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.dtensor.own_numbers import compare_at_backward
from fsdplaunch.runtime.auto.losses.exchange import RankLoss, check_passes, digest_of
from fsdplaunch.runtime.auto.losses.first_batches.comparison import Difference, difference
from fsdplaunch.runtime.auto.losses.first_batches.own_loss import computed_again
from fsdplaunch.runtime.auto.losses.graph import BatchReduction, LossGraph, read_graph
from fsdplaunch.runtime.auto.losses.held_parts import Part, Weighted, held_parts, part_factor
from fsdplaunch.runtime.auto.losses.learning_rates import LastRates
from fsdplaunch.runtime.auto.losses.mixing_report import tell_mixing
from fsdplaunch.runtime.auto.losses.plan import Amounts, facts_of
from fsdplaunch.runtime.auto.losses.report import LossReport
from fsdplaunch.runtime.auto.losses.terms import LossTerms, term_name
from fsdplaunch.runtime.auto.losses.whole_value import WholeValue, common_factor, has_one_value, has_penalty
from fsdplaunch.runtime.auto.model.own_buffers import tell_own_buffers
from fsdplaunch.runtime.collectives.rank_group import from_all
from fsdplaunch.runtime.script_line import script_line

WEIGHT = "_fsdplaunch_weight"
"""The attribute of a loss by which its value counts in the mean over ranks, where that is not equal."""


class LossScale:
    """One worker's losses.

    Attributes:
        terms: By the digests of all ranks' losses, what was found at the first backward that had them.
        rates: Of the last step, to be compared with those of other ranks.
    """

    def __init__(self, hook_context: HookContext) -> None:
        self.hook_context = hook_context
        self.reduction = hook_context.config.launch.loss_reduction
        self.terms: dict[tuple[float, ...], LossTerms] = {}
        self.digests: dict[Any, float] = {}
        self.rates = LastRates()
        self.report = LossReport(hook_context.printed)

    def apply(self, losses: list[torch.Tensor]) -> list[WholeValue]:
        """Scale what the losses are reduced by.

        Collective, by an exchange of one size whatever the losses are; more at the first backward of a line.

        Args:
            losses: What the script calls `backward` of.

        Returns:
            The values of one process, to be put into the losses after their backward.
        """
        compare_at_backward()
        whole = []
        for loss in losses:
            if loss.grad_fn is None or self.reduction == "mean":
                continue
            if self.reduction == "sum":
                self.hook_context.batches.loss_is_sum = True
                loss.grad_fn.register_prehook(_times(self.hook_context.data.size))
                continue
            values = self._scale(loss)
            if has_one_value(loss):
                whole.append(WholeValue(values, self.hook_context.exchange.group()))
        return whole

    def _graph(self, value: torch.Tensor) -> LossGraph:
        return read_graph(value.grad_fn, self.hook_context.batches.sizes, self.hook_context.data.size)

    def _scale(self, loss: torch.Tensor) -> list[tuple[torch.Tensor, float | None]]:
        """Scale one loss; return it and what the script holds of it, with the factors of their values."""
        context = self.hook_context
        found, nodes = self._graph(loss)
        line = script_line()
        parts = held_parts(loss, nodes) if has_one_value(loss) else []
        ranks = self._all_ranks(line, found, parts)
        every = tuple(each.digest for each in ranks)  # all ranks have the same, and make a plan together
        is_new = every not in self.terms
        if is_new:
            self.terms[every] = self._planned(line, loss, found)
            context.recorder.note_new_loss()
        else:
            context.stop_marking()
        terms = self.terms[every]
        by_term = self._followed(line, terms, [each.amounts for each in ranks])
        context.batches.loss_is_sum = bool(terms.plans) and all(plan.need == "ranks" for plan in terms.plans)
        weighted = self._weighted(found, terms, by_term)
        if terms.differ or terms.missing() or len({each.parts for each in ranks}) > 1:
            parts = []  # not the same on all ranks
        values = [(part.value, self._part_factor(part.value, weighted)) for part in parts]
        factor = self._register(loss, weighted)
        self._tell_inequality(line, loss, terms, weighted, is_new=is_new)
        return [(loss, factor), *values]

    def _tell_inequality(
        self, line: str, loss: torch.Tensor, terms: LossTerms, weighted: list[Weighted], *, is_new: bool
    ) -> None:
        """Print where the gradients of ranks' losses are not those of one process. Collective."""
        context, found = self.hook_context, [each.reduction for each in weighted]
        if not terms.alike:
            looks = not context.recorder.ended and not terms.missing()
            far = self._difference(loss, weighted) if looks else None
            equal = far is not None and not far.far
            if is_new:
                self.report.needs(line, terms, guessed=any(each.guessed for each in found))
            if is_new and not terms.missing():
                tell_mixing(context, line, loss, found, known=equal)
            self.report.differs(line, far)
        if is_new:
            tell_own_buffers(context)

    def _difference(self, loss: torch.Tensor, weighted: list[Weighted]) -> Difference | None:
        """Return how far ranks' gradients are from those of one process; None if not known. Collective."""
        recorder, device = self.hook_context.recorder, self.hook_context.device
        devices = [device] if device.type == "cuda" else []
        # What is drawn and joined meanwhile is not the script's.
        with recorder.paused(), fork_rng(devices), self.hook_context.batches.keeping_joined():
            own = computed_again(loss, recorder.program_of(loss), recorder.inputs, weighted)
            counts = [each.value for every in weighted for each in every.reduction.amounts]
            return difference(own, self.hook_context.batches.latest, counts)

    def _all_ranks(self, line: str, found: list[BatchReduction], parts: list[Part]) -> list[RankLoss]:
        """Return what the losses of all ranks are. Collective, at every backward."""
        context = self.hook_context
        key = (line, tuple((term_name(each), each.kind, len(each.shape), len(each.amounts)) for each in found))
        if key not in self.digests:
            self.digests[key] = digest_of(key)
        passes, drawn = context.position.passes, context.batches.drawn
        amounts = [each.value for reduction in found for each in reduction.amounts]
        held = digest_of([part.place for part in parts]) if parts else 0.0
        own = RankLoss(self.digests[key], passes, drawn, digest_of(self.rates.rates), held, amounts)
        ranks = context.exchange.all_ranks(own, line)
        check_passes(ranks, line)
        self.rates.check([each.rates for each in ranks], line)
        self.report.left_out(line, [each.batches for each in ranks])
        return ranks

    def _weighted(
        self, found: list[BatchReduction], terms: LossTerms, by_term: list[list[Amounts | None]]
    ) -> list[Weighted]:
        """Return by what this rank's reductions count."""
        weighted = []
        for place, reduction in zip(terms.places[dist.get_rank()], found, strict=True):
            if place is None:
                weighted.append(Weighted(reduction, None, 1.0))
                continue
            plan = terms.plans[place]
            factor: float | None = {"none": 1.0, "ranks": float(self.hook_context.data.size)}.get(plan.need)
            factor = plan.part(dist.get_rank(), by_term[place]) if plan.need == "part" else factor
            weighted.append(Weighted(reduction, plan, factor))
        return weighted

    def _register(self, loss: torch.Tensor, found: list[Weighted]) -> float | None:
        """Multiply the gradients of this rank's reductions by what they need; return what the loss needs."""
        for each in found:
            if each.plan is not None and each.plan.need != "none" and each.factor is not None:
                each.reduction.node.register_prehook(_times(each.factor))
        whole = common_factor([each.factor for each in found if each.plan is not None])
        needs = {"none" if each.plan is None else each.plan.need for each in found}
        if whole is not None and needs == {"part"}:
            vars(loss)[WEIGHT] = whole
        adds = "ranks" in needs and has_penalty(loss, [each.reduction for each in found])
        return None if adds else whole

    def _part_factor(self, value: torch.Tensor, loss: list[Weighted]) -> float | None:
        """Return by what the value of a part of the loss counts in the mean over ranks."""
        ranks = self.hook_context.data.size
        found = self._graph(value).reductions
        factor = part_factor(found, {each.reduction.node: each for each in loss}, ranks)
        return None if factor == ranks and has_penalty(value, found) else factor

    def _followed(self, line: str, terms: LossTerms, ranks: list[list[float]]) -> list[list[Amounts | None]]:
        """Return for each term what each rank divided it by, and let the plans follow."""
        by_term, news = [], []
        for term, plan in enumerate(terms.plans):
            amounts = terms.amounts(term, ranks) if plan.need != "unknown" and plan.kinds else []
            by_term.append(amounts)
            if amounts and plan.follow(amounts):
                news.append(term)
        self.report.followed(line, terms, news)
        return by_term

    def _planned(self, line: str, loss: torch.Tensor, found: list[BatchReduction]) -> LossTerms:
        """Decide what each reduction needs, from what it is on all ranks, and print it. Collective."""
        passes = self.hook_context.batches
        certain = [bool(_has_rows(each, passes.sizes)) or not passes.alike_passes for each in found]
        own = [facts_of(each, term_name(each), certain=sure) for each, sure in zip(found, certain, strict=True)]
        ranks = from_all((float(loss.detach().double().sum()), own))
        terms = LossTerms([facts for _, facts in ranks])
        if not passes.shared_passes and len({value for value, _ in ranks}) == 1:
            terms.take_for_means()  # all ranks computed the same rows
            return terms
        self.report.check_choice(line, terms)
        return terms


def _has_rows(reduction: BatchReduction, sizes: Collection[int]) -> bool:
    return bool(reduction.shape[:1]) and reduction.shape[0] in sizes


def _times(factor: float) -> Callable[[Any], Any]:
    def scale(gradients: Any) -> Any:
        return tuple(None if gradient is None else _scaled(gradient, factor) for gradient in gradients)

    return scale


def _scaled(gradient: torch.Tensor, factor: float) -> torch.Tensor:
    """Return a gradient times a factor; zeros for 0, also where the rank divided by a count of 0."""
    return gradient * factor if factor else torch.zeros_like(gradient)
