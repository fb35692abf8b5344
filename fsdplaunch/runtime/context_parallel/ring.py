"""Attention over split sequences in a ring: keys and values go from rank to rank, queries stay."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.messages import script_line
from fsdplaunch.runtime.torch_internals.modules import untraced
from fsdplaunch.runtime.torch_internals.tensors import AttentionKernel, kernel_for

HEADS = 1


class Passing:
    """The neighbours of this rank on an axis.

    Attributes:
        rank: This rank's place on the axis.
        size: How many ranks it has.
    """

    def __init__(self, axis: DeviceMesh) -> None:
        self.rank, self.size = axis.get_local_rank(), axis.size()
        self._group = axis.get_group()
        ranks = dist.get_process_group_ranks(self._group)
        self._after, self._before = ranks[(self.rank + 1) % self.size], ranks[self.rank - 1]

    def pass_on(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to send a tensor to the next rank, and to receive that of the rank before.

        All ranks call this as often, with tensors of the same shape and dtype.

        Args:
            tensor: Contiguous; unchanged until the other one has arrived.

        Returns:
            What waits for the other one and returns it.
        """
        other = torch.empty_like(tensor)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, self._after, self._group),
                dist.P2POp(dist.irecv, other, self._before, self._group),
            ]
        )

        def arrived() -> torch.Tensor:
            while works:
                works.pop(0).wait()  # and be freed: it holds what was sent
            return other

        return arrived

    def around(self, tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield each rank's tensor with its place: this one's own, then that of the rank before, and so on.

        The next one travels while one is used; all ranks iterate to the end.
        """
        for step in range(self.size):
            arrived = self.pass_on(tensor) if step + 1 < self.size else None
            yield (self.rank - step) % self.size, tensor
            if arrived is not None:
                tensor = arrived()


Shapes = tuple[torch.Size, torch.Size]
"""Those of a rank's keys and of its values."""


def packed(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return keys and values as one tensor, which goes in one message."""
    return torch.cat([key.flatten(), value.flatten()])


def unpacked(message: torch.Tensor, shapes: Shapes) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `packed` joined."""
    keys, values = message.split([shape.numel() for shape in shapes])
    return keys.view(shapes[0]), values.view(shapes[1])


def for_each_head(message: torch.Tensor, shapes: Shapes, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values for each head of the query: fewer are sent where heads share them."""
    keys, values = unpacked(message, shapes)
    return _repeated(keys, heads), _repeated(values, heads)


def summed_over_heads(gradient: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return the gradient of keys or values of a shape, which several heads may share."""
    return gradient if gradient.shape == shape else gradient.unflatten(HEADS, (shape[HEADS], -1)).sum(2)


def _repeated(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    groups = heads // tensor.size(HEADS)
    return tensor if groups == 1 else tensor.repeat_interleave(groups, HEADS)


_AT_ONCE = 2**24
"""How many scores are computed at once: of all rows they would be the square of the sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """How scores of rows with one part of the keys become weights.

    Attributes:
        scale: What products are multiplied by.
        is_causal: Whether each row sees the keys up to its own place.
        mask: Of these rows and keys, as scaled_dot_product_attention has it, or None.
        dropout: The probability that a weight becomes zero.
        seed: What is drawn for it; the same in forward and backward.
    """

    scale: float
    is_causal: bool = False
    mask: torch.Tensor | None = None
    dropout: float = 0.0
    seed: int = 0


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that results of a dtype are added up in: fp32, or fp64."""
    return torch.promote_types(dtype, torch.float32)


def finite(sums: torch.Tensor) -> torch.Tensor:
    """Return logsumexps with 0 for rows that see no key: their scores are -inf, and stay weights of 0."""
    return sums.masked_fill(sums.isneginf(), 0.0)


def added(
    one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result and the logsumexps over two parts of the keys together.

    Args:
        one: Result (batch x heads x rows x width) and logsumexps (batch x heads x rows), both `wide`; changed.
        other: The same over other keys.
    """
    sums = torch.logaddexp(one[1], other[1])
    shares = [(part - finite(sums)).exp_().unsqueeze(-1) for part in (one[1], other[1])]
    return one[0].mul_(shares[0]).addcmul_(other[0], shares[1]), sums


def attend_to_part(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result of attention to these keys alone, and the logsumexps of its rows, both `wide`.

    Args:
        query: Batch x heads x rows x width.
        key: Batch x heads x keys x width.
        value: Batch x heads x keys x its own width.
        scoring: How scores become weights.
    """
    parts = []
    key, value = (each.to(wide(query.dtype)) for each in (key, value))
    for rows, kept in _pieces(query, key, scoring):
        scores = _scores(query, key, rows, scoring)
        sums = scores.logsumexp(-1)
        weights = scores.sub_(finite(sums).unsqueeze(-1)).exp_()
        parts.append(((weights if kept is None else weights.mul_(kept)) @ value, sums))
    results, sums_of_rows = zip(*parts, strict=True)
    return torch.cat(results, -2), torch.cat(sums_of_rows, -1)


def gradients_of_part(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    result: torch.Tensor,
    sums: torch.Tensor,
    scoring: Scoring,
    mask_gradient: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value that come of these keys, `wide`.

    Args:
        gradient: Of the result.
        query: As in forward, as are key and value.
        key: A part of the keys.
        value: Theirs.
        result: Over all keys.
        sums: The logsumexps over all keys.
        scoring: As in forward.
        mask_gradient: What the mask's gradient is added to, of the mask's shape; or None.
    """
    kind = wide(query.dtype)
    key, value = key.to(kind), value.to(kind)
    to_query, to_key, to_value = (
        torch.empty_like(query, dtype=kind),
        torch.zeros_like(key),
        torch.zeros_like(value),
    )
    for rows, kept in _pieces(query, key, scoring):
        weights = _scores(query, key, rows, scoring).sub_(finite(sums[..., rows]).unsqueeze(-1)).exp_()
        own = gradient[..., rows, :].to(kind)
        to_value += (weights if kept is None else weights * kept).transpose(-2, -1) @ own
        to_weights = own @ value.transpose(-2, -1)
        to_weights = to_weights if kept is None else to_weights.mul_(kept)
        to_scores = to_weights.sub_((own * result[..., rows, :]).sum(-1, keepdim=True)).mul_(weights)
        if mask_gradient is not None:
            part = _of_rows(mask_gradient, rows)
            part += to_scores.sum_to_size(part.shape)
        to_query[..., rows, :] = to_scores @ key * scoring.scale
        to_key += to_scores.transpose(-2, -1) @ query[..., rows, :].to(kind) * scoring.scale
    return to_query, to_key, to_value


def _pieces(
    query: torch.Tensor, key: torch.Tensor, scoring: Scoring
) -> Iterator[tuple[slice, torch.Tensor | None]]:
    """Yield pieces of the rows, each with what its weights are multiplied by for dropout."""
    batch, heads, length, _ = query.shape
    rows = max(1, _AT_ONCE // max(1, batch * heads * key.size(-2)))
    random = torch.Generator(query.device).manual_seed(scoring.seed) if scoring.dropout else None
    for start in range(0, length, rows):
        piece = slice(start, min(start + rows, length))
        if random is None:
            yield piece, None
            continue
        shape = (batch, heads, piece.stop - start, key.size(-2))
        kept = torch.rand(shape, generator=random, device=query.device, dtype=key.dtype) >= scoring.dropout
        yield piece, kept.to(key.dtype) / ((1 - scoring.dropout) or 1)


def _scores(query: torch.Tensor, key: torch.Tensor, rows: slice, scoring: Scoring) -> torch.Tensor:
    scores = query[..., rows, :].to(key.dtype) @ key.transpose(-2, -1) * scoring.scale
    if scoring.is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(rows.start)
        scores = scores.masked_fill(~seen, float("-inf"))
    if scoring.mask is None:
        return scores
    mask = _of_rows(scoring.mask, rows)
    return scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores.add_(mask)


def _of_rows(mask: torch.Tensor, rows: slice) -> torch.Tensor:
    """Return some rows of a mask; all of one that has the same row for all."""
    return mask if mask.size(-2) == 1 else mask[..., rows, :]


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
