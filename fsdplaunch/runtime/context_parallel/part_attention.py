"""Attention to a part of the keys, by matrix products: for masks, dropout, and where torch has no kernel.

A result comes with the logsumexp of its rows' scores, so that results over several parts add up.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

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
