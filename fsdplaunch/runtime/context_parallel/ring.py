"""Attention over split sequences in a ring: keys and values go from rank to rank, queries stay.

A rank has the keys and values of one other rank at a time, beside its own, while the next ones arrive. In backward
they go around again, with their gradients, which end where they belong.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.context_parallel.part_attention import (
    Scoring,
    added,
    attend_to_part,
    gradients_of_part,
    wide,
)
from fsdplaunch.runtime.context_parallel.passing import (
    HEADS,
    Passing,
    Shapes,
    for_each_head,
    packed,
    summed_over_heads,
    unpacked,
)
from fsdplaunch.runtime.script_line import script_line
from fsdplaunch.runtime.torch_internals.operators import AttentionKernel, kernel_for
from fsdplaunch.runtime.torch_internals.wrappers import untraced

_POSITIONS = 2
_SEEDS = 2**62


def ring_attention(
    axis: DeviceMesh,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scoring: Scoring,
) -> torch.Tensor:
    """Return attention of this rank's positions to those of all.

    Args:
        axis: The ranks that split sequences.
        query: Batch x heads x this rank's positions x width.
        key: The same, with as many heads or a divisor of them.
        value: As key; its width may be another.
        mask: Of all positions, as scaled_dot_product_attention has it, or None.
        scoring: How scores become weights over full sequences, but for the mask and the seed.

    Raises:
        ShardingError: The tensors do not fit each other, or the attention is causal and has other numbers of keys
            than of queries; or, in backward, a gradient of the gradient is wanted.
    """
    query, key, value, mask = _autocast(query, key, value, mask)
    _check(query, key, value, is_causal=scoring.is_causal)
    if scoring.dropout:
        scoring = replace(scoring, seed=int(torch.randint(_SEEDS, ())))
    return _apply(axis, query, key, value, mask, scoring)  # type: ignore[no-any-return]


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool) -> None:
    """Check what kernels take for granted: they would read other memory."""
    fits = query.dtype == key.dtype == value.dtype and key.shape[:-1] == value.shape[:-1]
    fits = fits and (query.size(0), query.size(-1)) == (key.size(0), key.size(-1))
    if not fits or query.size(HEADS) % key.size(HEADS):
        kinds = ", ".join(f"{tuple(each.shape)} {each.dtype}" for each in (query, key, value))
        msg = f"{script_line()}: query, key and value do not fit each other: {kinds}"
        raise ShardingError(msg, hint="they need one dtype and batch; heads of keys divide those of queries")
    rows, keys = query.size(_POSITIONS), key.size(_POSITIONS)
    if is_causal and rows != keys:
        msg = f"{script_line()}: causal attention of {rows} positions to {keys} cannot go in a ring (cp_size)"
        raise ShardingError(msg, hint="give it as many keys as queries, or leave cp_size out")


def _autocast(*tensors: torch.Tensor | None) -> Iterator[Any]:
    """Yield tensors as autocast gives them to scaled_dot_product_attention."""
    for each in tensors:
        casts = each is not None and torch.is_autocast_enabled(each.device.type) and each.is_floating_point()
        if each is None or not casts or each.dtype == torch.float64:
            yield each
        else:
            yield each.to(torch.get_autocast_dtype(each.device.type))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        axis: DeviceMesh,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scoring: Scoring,
    ) -> torch.Tensor:
        kernel = None if mask is not None or scoring.dropout else kernel_for(query, key, value)
        ring = ctx.ring = _Ring(Passing(axis), kernel, scoring, (key.shape, value.shape))
        own = packed(key, value)
        with torch.autocast(query.device.type, enabled=False):
            result, sums = ring.attend(_last_dense(query), own, mask)
        ctx.save_for_backward(query, own, mask, result, sums)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            msg = "the gradient of a gradient cannot be computed through attention in a ring (cp_size)"
            raise ShardingError(msg, hint="leave create_graph out, or cp_size")
        query, own, mask, result, sums = ctx.saved_tensors
        to_mask = torch.zeros_like(mask, dtype=wide(query.dtype)) if ctx.needs_input_grad[4] else None
        saved = _Saved(_last_dense(query), mask, result, sums, _last_dense(gradient), to_mask)
        with torch.autocast(query.device.type, enabled=False):
            grads = ctx.ring.gradients(saved, own)
        to_mask = None if to_mask is None else to_mask.to(mask.dtype)
        return None, *(each.to(query.dtype) for each in grads), to_mask, None


_apply = untraced(_Attention.apply)


def _last_dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose last dimension kernels can read."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


@dataclass(frozen=True, slots=True)
class _Saved:
    """What backward has of this rank's positions; `to_mask` is what the mask's gradient is added to."""

    query: torch.Tensor
    mask: torch.Tensor | None
    result: torch.Tensor
    sums: torch.Tensor
    gradient: torch.Tensor
    to_mask: torch.Tensor | None


@dataclass(slots=True)
class _Ring:
    """One attention, in forward and backward.

    Attributes:
        passing: This rank's neighbours.
        kernel: Torch's, or None for matrix products.
        scoring: How scores become weights over full sequences, but for the mask.
        shapes: Of each rank's keys and values.
        kept: What the kernel's forward gives its backward; the same for each part.
    """

    passing: Passing
    kernel: AttentionKernel | None
    scoring: Scoring
    shapes: Shapes
    kept: tuple[Any, ...] = ()

    def attend(
        self, query: torch.Tensor, own: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the result, and the logsumexps of its rows.

        Args:
            query: Of this rank.
            own: Its keys and values, packed.
            mask: Of all positions.
        """
        parts = (
            self._attend_to(source, query, message, mask)
            for source, message in self.passing.around(own)
            if self._sees(source)
        )
        result, sums = reduce(added, parts)
        return result.to(query.dtype), sums

    def gradients(self, saved: _Saved, own: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the gradients of query, key and value, in the dtype that they are added up in.

        Those of another rank's keys and values are added to what comes from the rank before, and sent on.
        """
        kind = wide(own.dtype)
        to_query = torch.zeros_like(saved.query, dtype=kind)
        arrived: Callable[[], torch.Tensor] = partial(torch.zeros_like, own, dtype=kind)
        for source, message in self.passing.around(own):
            found = self._gradients_of(source, saved, message, to_query) if self._sees(source) else ()
            travelling = arrived()
            for place, part in enumerate(found):
                unpacked(travelling, self.shapes)[place].add_(part)
            del found, message
            arrived = self.passing.pass_on(travelling)
        return to_query, *unpacked(arrived(), self.shapes)

    def _sees(self, source: int) -> bool:
        return not self.scoring.is_causal or source <= self.passing.rank

    def _is_causal(self, source: int) -> bool:
        return self.scoring.is_causal and source == self.passing.rank

    def _attend_to(
        self, source: int, query: torch.Tensor, message: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = for_each_head(message, self.shapes, query.size(HEADS))
        if self.kernel is None:
            return attend_to_part(query, keys, values, self._scoring(source, mask))
        causal, scale = self._is_causal(source), self.scoring.scale
        result, sums, self.kept = self.kernel.forward(query, keys, values, causal, scale)
        return result.to(wide(query.dtype)), sums

    def _gradients_of(
        self, source: int, saved: _Saved, message: torch.Tensor, to_query: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return the gradients of one rank's keys and values, and add to that of the query."""
        each_head = for_each_head(message, self.shapes, saved.query.size(HEADS))
        given = (saved.gradient, saved.query, *each_head, saved.result, saved.sums)
        if self.kernel is None:
            to_mask = None if saved.to_mask is None else self._piece(saved.to_mask, source)
            own, *theirs = gradients_of_part(*given, self._scoring(source, saved.mask), to_mask)
        else:
            causal, scale = self._is_causal(source), self.scoring.scale
            own, *theirs = self.kernel.backward(*given, self.kept, causal, scale)
        to_query += own
        return tuple(map(summed_over_heads, theirs, self.shapes))

    def _scoring(self, source: int, mask: torch.Tensor | None) -> Scoring:
        return replace(
            self.scoring,
            is_causal=self._is_causal(source),
            mask=None if mask is None else self._piece(mask, source),
            seed=self.scoring.seed + self.passing.rank * self.passing.size + source,
        )

    def _piece(self, mask: torch.Tensor, source: int) -> torch.Tensor:
        """Return the mask of this rank's positions and another's keys."""
        for dim, place in ((-2, self.passing.rank), (-1, source)):
            mask = mask if mask.size(dim) == 1 else mask.chunk(self.passing.size, dim)[place]
        return mask
