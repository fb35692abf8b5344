"""Keep the random generators of all ranks alike, where the global batch is kept.

Needed because ranks draw unequal numbers for what each has of its own, such as dropout of the tokens that are
masked or of a graph's nodes: from then on they would shuffle the data in different orders and read rows twice.
"""

import random
import sys
from hashlib import blake2b

import torch
import torch.distributed as dist

from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.data.row_order import tell_once
from fsdplaunch.runtime.auto.rng.rng_streams import random_states, set_random_states
from fsdplaunch.runtime.collectives.rank_group import from_rank_0

_UNEQUAL = (
    "ranks have drawn unequal numbers of random numbers, such as dropout of rows that each rank chooses: each"
    " draws for its own rows only"
)


def align_random_states(hook_context: HookContext) -> None:
    """Give all ranks the generators of rank 0, where they are no longer alike; print that once a line. Collective.

    Args:
        hook_context: This worker's, at a backward pass, which all ranks make.
    """
    own = _fingerprint()
    extremes = torch.tensor([own, -own], dtype=torch.float64)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=hook_context.exchange.group())
    if extremes[0] == -extremes[1]:
        return
    states = from_rank_0(random_states() if dist.get_rank() == 0 else None)
    if dist.get_rank():
        set_random_states(states)
    tell_once(hook_context, "unequal draws", _UNEQUAL)


def _fingerprint() -> float:
    """Return a number of the generators' states, exact as a float64: 48 bits."""
    found = blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=6)
    found.update(str(hash(random.getstate())).encode())
    if "numpy" in sys.modules:
        _, key, *rest = sys.modules["numpy"].random.get_state()
        found.update(key.tobytes() + repr(rest).encode())
    return float(int.from_bytes(found.digest(), "big"))
