"""Attention over split sequences in a ring: keys and values go from rank to rank, queries stay.

A rank has the keys and values of one other rank at a time, beside its own, while the next ones arrive. In backward
they go around again, with their gradients, which end where they belong. Torch's own ring attention
(torch.distributed.tensor.experimental) takes GPUs only and is not stable yet.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.messages import script_line
from fsdplaunch.runtime.torch_internals.modules import untraced
from fsdplaunch.runtime.torch_internals.tensors import AttentionKernel, kernel_for

_HEADS, _POSITIONS = 1, 2


def ring_attention(
    axis: DeviceMesh, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool, scale: float
) -> torch.Tensor:
    """Return attention of this rank's positions to those of all.

    Tensors are batch x heads x this rank's positions x width; heads of keys and values may be a divisor of the
    query's.

    Raises:
        ShardingError: The tensors do not fit each other, torch has no kernel for them, or the attention is causal
            and has other numbers of keys than of queries; or, in backward, a gradient of the gradient is wanted.
    """
    device = query.device.type
    casts = torch.is_autocast_enabled(device)  # as it casts for scaled_dot_product_attention
    query, key, value = (
        each.to(torch.get_autocast_dtype(device)) if casts and each.dtype != torch.float64 else each
        for each in (query, key, value)
    )
    _check(query, key, value, is_causal=is_causal)
    kernel = kernel_for(query, key, value)
    if kernel is None:
        kinds = f"{query.dtype} of width {query.size(-1)} and {value.size(-1)} on {device}"
        msg = f"{script_line()}: torch has no kernel for ring attention of {kinds} (cp_size)"
        raise ShardingError(msg, hint="use a cp_size that divides the heads, or leave it out")
    ring = _Ring(axis, kernel, is_causal, scale, (key.shape, value.shape))
    return _apply(ring, query, key, value)  # type: ignore[no-any-return]


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool) -> None:
    """Check what kernels take for granted: they would read other memory."""
    fits = query.dtype == key.dtype == value.dtype and key.shape[:-1] == value.shape[:-1]
    fits = fits and (query.size(0), query.size(-1)) == (key.size(0), key.size(-1))
    if not fits or query.size(_HEADS) % key.size(_HEADS):
        kinds = ", ".join(f"{tuple(each.shape)} {each.dtype}" for each in (query, key, value))
        msg = f"{script_line()}: query, key and value do not match: {kinds}"
        raise ShardingError(
            msg, hint="they need the same dtype and batch; the number of key heads must divide that of query heads"
        )
    rows, keys = query.size(_POSITIONS), key.size(_POSITIONS)
    if is_causal and rows != keys:
        msg = f"{script_line()}: causal ring attention of {rows} positions to {keys} is not possible (cp_size)"
        raise ShardingError(msg, hint="give it as many keys as queries, or leave cp_size out")


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ring: "_Ring", query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        ctx.ring = ring
        own = torch.cat([key.flatten(), value.flatten()])  # goes in one message
        with torch.autocast(query.device.type, enabled=False):
            result, sums = ring.attend(_last_dense(query), own)
        ctx.save_for_backward(query, own, result, sums)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            msg = "the gradient of a gradient cannot be computed through ring attention (cp_size)"
            raise ShardingError(msg, hint="leave create_graph out, or cp_size")
        query, own, result, sums = ctx.saved_tensors
        with torch.autocast(query.device.type, enabled=False):
            grads = ctx.ring.gradients(_last_dense(gradient), _last_dense(query), own, result, sums)
        return None, *(each.to(query.dtype) for each in grads)


_apply = untraced(_Attention.apply)


def _last_dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose last dimension kernels can read."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


@dataclass(slots=True)
class _Ring:
    """One attention, in forward and backward."""

    axis: DeviceMesh  # the ranks
    kernel: AttentionKernel  # torch's
    is_causal: bool  # whether each position sees those up to its own
    scale: float  # of products of queries and keys
    shapes: tuple[torch.Size, torch.Size]  # of each rank's keys and values
    kept: tuple[Any, ...] = ()  # what the kernel's forward gives its backward; the same for each part

    def attend(self, query: torch.Tensor, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the result, and the logsumexps of its rows, for this rank's query, keys and values."""

        def parts() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for source, message in self._around(own):
                if self._sees(source):
                    given = (query, *self._for_each_head(message, query))
                    result, sums, self.kept = self.kernel.forward(*given, self._is_causal(source), self.scale)
                    yield result.to(_wide(query.dtype)), sums

        result, sums = reduce(added, parts())
        return result.to(query.dtype), sums

    def gradients(
        self,
        gradient: torch.Tensor,
        query: torch.Tensor,
        own: torch.Tensor,
        result: torch.Tensor,
        sums: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Return the gradients of query, key and value, in the dtype that they are added up in.

        Those of another rank's keys and values are added to what comes from the rank before, and sent on.
        """
        kind = _wide(own.dtype)
        to_query = torch.zeros_like(query, dtype=kind)
        arrived: Callable[[], torch.Tensor] = partial(torch.zeros_like, own, dtype=kind)
        for source, message in self._around(own):
            found: list[torch.Tensor] = []
            if self._sees(source):
                given = (gradient, query, *self._for_each_head(message, query), result, sums, self.kept)
                mine, *found = self.kernel.backward(*given, self._is_causal(source), self.scale)
                to_query += mine
                del given
            travelling = arrived()
            for into, part in zip(self._unpacked(travelling), found, strict=False):
                # Several heads may share keys and values.
                shared = part.shape != into.shape
                into.add_(part.unflatten(_HEADS, (into.size(_HEADS), -1)).sum(2) if shared else part)
            del found, message
            arrived = self._pass_on(travelling)
        return to_query, *self._unpacked(arrived())

    def _sees(self, source: int) -> bool:
        return not self.is_causal or source <= self.axis.get_local_rank()

    def _is_causal(self, source: int) -> bool:
        return self.is_causal and source == self.axis.get_local_rank()

    def _unpacked(self, message: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the keys and values of a message."""
        parts = message.split([shape.numel() for shape in self.shapes])
        return tuple(part.view(shape) for part, shape in zip(parts, self.shapes, strict=True))

    def _for_each_head(self, message: torch.Tensor, query: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield keys and values for each head of the query: fewer are sent where heads share them."""
        for tensor in self._unpacked(message):
            groups = query.size(_HEADS) // tensor.size(_HEADS)
            yield tensor if groups == 1 else tensor.repeat_interleave(groups, _HEADS)

    def _around(self, tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield each rank's tensor with its place: this one's own, then that of the rank before, and so on.

        The next one travels while one is used; all ranks iterate to the end.
        """
        for step in range(self.axis.size()):
            arrived = self._pass_on(tensor) if step + 1 < self.axis.size() else None
            yield (self.axis.get_local_rank() - step) % self.axis.size(), tensor
            if arrived is not None:
                tensor = arrived()

    def _pass_on(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to send a tensor to the next rank; return what waits for that of the rank before and returns it.

        The tensor is contiguous, and unchanged until the other one has arrived.
        """
        group, place = self.axis.get_group(), self.axis.get_local_rank()
        ranks, other = dist.get_process_group_ranks(group), torch.empty_like(tensor)
        send = dist.P2POp(dist.isend, tensor, ranks[(place + 1) % len(ranks)], group)
        receive = dist.P2POp(dist.irecv, other, ranks[place - 1], group)
        works = dist.batch_isend_irecv([send, receive])

        def arrived() -> torch.Tensor:
            while works:
                works.pop(0).wait()  # and be freed: it holds what was sent
            return other

        return arrived


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that results of a dtype are added up in: fp32, or fp64."""
    return torch.promote_types(dtype, torch.float32)


def added(
    one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return result and logsumexps of rows over two parts of the keys together; changes the first."""
    sums = torch.logaddexp(one[1], other[1])
    shares = [(part - sums).exp_().unsqueeze(-1) for part in (one[1], other[1])]
    return one[0].mul_(shares[0]).addcmul_(other[0], shares[1]), sums
