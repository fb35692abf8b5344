"""What goes around in a ring: keys and values as one message, from each rank of an axis to the next."""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

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
