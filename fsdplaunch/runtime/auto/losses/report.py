"""Print what the losses of all ranks are, where that is not plain from the script, with the script's line."""

import math
from collections.abc import Collection, Sequence

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.auto.losses.first_batches.comparison import Difference
from fsdplaunch.runtime.auto.losses.terms import LossTerms
from fsdplaunch.runtime.collectives.monitored_barrier import name_ranks


class LossReport:
    """What is printed of losses, once in a run: a line may have plans for several combinations of losses.

    Args:
        printed: What was printed in this run.
    """

    def __init__(self, printed: set[str]) -> None:
        self._printed = printed

    def _say(self, message: str, *, is_unequal: bool = False) -> None:
        if message not in self._printed:
            self._printed.add(message)
            (messages.say_unequal if is_unequal else messages.say)(message)

    def left_out(self, line: str, batches: Sequence[int]) -> None:
        """Print that ranks compute this loss of different batches, since some have left batches out."""
        if len(set(batches)) > 1:
            more, fewer = batches.index(max(batches)), batches.index(min(batches))
            self._say(
                f"{line}: rank {more} has drawn more batches than rank {fewer}, as where it leaves some out by the"
                " rows that it has: ranks add up rows of different batches, and one process decides by all rows",
                is_unequal=True,
            )

    def followed(self, line: str, terms: LossTerms, news: Collection[int]) -> None:
        """Print what has turned out of terms by what ranks divide them by.

        Args:
            line: Of the script, that calls backward.
            terms: Of all ranks' losses.
            news: Which of them were found to be divided by counts.
        """
        if any(plan.is_scaled for plan in terms.plans):
            self._say(
                f"{line}: a term of the loss is multiplied by a number that each rank has of its own rows, which"
                " is not what one process computes",
                is_unequal=True,
            )
        if news:
            self._say(f"{line}: each rank's mean is over a count of its own: gradients are weighted by it")
        if any(terms.is_ambiguous(term) for term in news):
            self._say(
                f"{line}: the loss has several terms of one kind: those of two ranks are taken for the same in"
                " their order, which is that of one process only where all ranks have all of them"
            )

    def differs(self, line: str, found: Difference | None) -> None:
        """Print that the gradients of a batch are not those of one process, if nothing was said of this line."""
        if found is None or not found.far or any(text.startswith(f"{line}: ") for text in messages.unequal):
            return
        how = (
            f"its gradients differ by {found.far:.0%} from those of all ranks' rows together"
            if found.far < math.inf
            else "ranks compute it with different numbers"
        )
        self._say(
            f"{line}: the loss is not that of one process: {how} ({found.cause or 'some rows count otherwise'})",
            is_unequal=True,
        )

    def check_choice(self, line: str, terms: LossTerms) -> None:
        """Print that only some ranks have a term of the loss.

        Raises:
            ShardingError: Ranks have losses that have nothing in common.
        """
        if terms.exclude_each_other():
            msg = f"{line}: ranks have chosen different losses, each by the rows that it has"
            hint = (
                "choose by a number that all ranks have alike, or set launch.loss_reduction: mean to average what"
                " they have"
            )
            raise ShardingError(msg, hint=hint)
        if terms.differ:
            self._say(
                f"{line}: ranks compute the loss by different operations, each as the rows that it has decide;"
                " one process decides by all",
                is_unequal=True,
            )
        for term, ranks in terms.missing().items():
            what = terms.names[term].partition(" ")[0]
            self._say(
                f"{line}: a term of the loss ({what}) is missing on {name_ranks(ranks)}: it counts there as one"
                " over no rows, which is that of one process if it is left out where there is nothing to add"
            )

    def needs(self, line: str, terms: LossTerms, *, guessed: bool) -> None:
        """Print how the terms are reduced, where that is not by plain means.

        Args:
            line: Of the script, that calls backward.
            terms: Of all ranks' losses.
            guessed: Whether a sum is taken for a mean over the one row that a rank has.
        """
        names = [name.partition(" ")[0] for name in terms.names]
        unknown = [name for name, plan in zip(names, terms.plans, strict=True) if plan.need == "unknown"]
        if any(plan.need == "ranks" for plan in terms.plans):
            self._say(f"{line}: the loss is a sum over the batch: its gradients are added up over ranks")
        if guessed:
            self._say(
                f"{line}: a sum is divided by 1, and each rank has one row: it is taken for a mean over the batch"
                " (launch.loss_reduction: sum if it is a sum)"
            )
        if unknown or not names:
            what = ", ".join(dict.fromkeys(unknown)) or "its graph does not show it"
            self._say(
                f"{line}: the loss is no plain sum or mean over the batch ({what}): gradients are averaged"
                " over ranks, which need not be those of one process (launch.loss_reduction sets it)",
                is_unequal=True,
            )
