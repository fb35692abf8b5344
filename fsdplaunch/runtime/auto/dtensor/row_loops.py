"""Loops over the rows of a shard: they get those of the full tensor, as plain tensors, gathered once."""

import weakref
from collections.abc import Iterator
from typing import Any

import torch

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.auto.dtensor.shard_handlers import full_tensor
from fsdplaunch.runtime.auto.dtensor.shard_parts import full_copy
from fsdplaunch.runtime.script_line import script_line
from fsdplaunch.runtime.state_dict.optim_state_dict import cut_to_shard
from fsdplaunch.runtime.torch_internals.dtensor import local_tensor
from fsdplaunch.runtime.torch_internals.tensors import change_count

_kept: list["_Rows"] = []
"""Those whose rows the script still has: `first, *others = p.data` is no loop, and what is written comes later."""


def rows(_func: Any, args: Any, _kwargs: Any) -> Any:
    """Go over the rows of the full tensor; what is written into them is in the shard when the loop has ended.

    What is written later is there at the next pass, step, read or save. Collective.
    """
    shard, *_ = args
    wanted = torch.is_grad_enabled() and shard.requires_grad
    put_kept_rows()
    return _Rows(shard, full_tensor(shard) if wanted else None).each()


def put_kept_rows() -> None:
    """Put into the shards what was written into rows after their loops."""
    while _kept:
        _kept.pop().put()


class _Rows:
    """The rows of one shard.

    Args:
        shard: Whose full tensor they are of.
        full: That tensor, with the shard's gradients; None to gather it without.
    """

    def __init__(self, shard: Any, full: torch.Tensor | None) -> None:
        self.shard = shard
        with torch.inference_mode(mode=False), torch.no_grad():  # what is made in it does not count its changes
            self.full = full_copy(shard) if full is None else full
        self.before, self.of = change_count(self.full), change_count(shard)

    def each(self) -> Iterator[torch.Tensor]:
        """Yield them, and put back what was written when the loop ends."""
        given: list[weakref.ref[torch.Tensor]] = []
        try:
            for row in self.full.unbind():
                given.append(weakref.ref(row))
                yield row
        finally:
            self.put()
            if any(ref() is not None for ref in given):
                _kept.append(self)

    def put(self) -> None:
        """Put into the shard what was written so far; without communication.

        Raises:
            ShardingError: The shard has changed since by something else.
        """
        new = cut_to_shard(self.full.detach(), self.shard)
        is_current = change_count(self.shard) == self.of
        if change_count(self.full) == self.before and not (is_current and _differs(new, self.shard)):
            return
        if not is_current:
            msg = f"{script_line()}: rows of a sharded parameter were written into after the parameter has changed"
            raise ShardingError(msg, hint="take the rows anew where they are written into")
        with torch.no_grad():
            self.shard.copy_(new)
        self.before, self.of = change_count(self.full), change_count(self.shard)


def _differs(new: Any, shard: Any) -> bool:
    """Return whether values differ from a shard's: torch does not count what is written into a row's `.data`."""
    return not torch.equal(local_tensor(new), local_tensor(shard))
