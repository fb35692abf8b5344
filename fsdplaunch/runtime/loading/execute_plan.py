"""Give every rank its shards of a model's tensors as a plan says, and say what was done."""

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import torch

from fsdplaunch.byte_sizes import size_words
from fsdplaunch.errors import CheckpointError
from fsdplaunch.name_lists import listed
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.collectives.rank_group import RankGroup
from fsdplaunch.runtime.loading.broadcast import broadcast_all
from fsdplaunch.runtime.loading.load_plan import LoadPlan
from fsdplaunch.runtime.loading.local_shards import LocalShard
from fsdplaunch.runtime.loading.read_shards import ShardReader, source_dtype

_NAMES_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedWeights:
    """What one rank did.

    Attributes:
        tensors: How many tensors came from the files.
        nbytes: How many bytes this rank read.
        seconds: How long it took.
    """

    tensors: int
    nbytes: int
    seconds: float


def execute_plan(ranks: RankGroup, plan: LoadPlan, held: Sequence[LocalShard]) -> LoadedWeights:
    """Read this rank's shard of everything the plan found; every rank calls this.

    Args:
        ranks: Who loads.
        plan: What is where.
        held: This rank's shards of the model, in the same order on all ranks.

    Raises:
        CheckpointError: A rank could not read; raised on every rank.
    """
    begun = time.perf_counter()
    due = [(shard, name) for shard in held if (name := plan.stored(shard.names)) is not None]
    nbytes = 0
    with torch.no_grad(), ranks.raise_on_all(f"load weights from {plan.where}"):
        if len({name for _, name in due}) != len(plan.match.found):
            missed = sorted(set(plan.match.found) - {name for _, name in due})
            msg = f"{missed[0]} is nowhere in the sharded model"
            raise CheckpointError(
                msg, hint="this is a defect in loading this model; build it with from_pretrained"
            )
        if not plan.files.pickled:
            with closing(ShardReader(plan.files)) as reader:
                _read(reader, plan, due)
                nbytes = reader.bytes_read
    if plan.files.pickled:
        with torch.no_grad():
            typed = [(shard, name, _dtype(plan, name)) for shard, name in due]
            broadcast_all(ranks, plan.full, typed)
        plan.full.clear()
    return LoadedWeights(tensors=len(due), nbytes=nbytes, seconds=time.perf_counter() - begun)


def _read(reader: ShardReader, plan: LoadPlan, due: list[tuple[LocalShard, str]]) -> None:
    """Read in the order of the files, so that disks read on and on."""
    found = plan.match.found
    for shard, name in sorted(due, key=lambda one: (found[one[1]][0].file, found[one[1]][0].start)):
        first, *others = found[name]
        reader.fill(shard, first)
        for other in others:
            if (other.file, other.start) != (first.file, first.start) and not reader.same(shard, first, other):
                msg = f"{first.name} and {other.name} are one parameter in the model and differ in the files"
                raise CheckpointError(msg, hint="build the model without tied weights (tie_word_embeddings=False)")


def _dtype(plan: LoadPlan, name: str) -> torch.dtype:
    stored = plan.match.found[name][0]
    dtype: torch.dtype = getattr(torch, stored.dtype.name if stored.dtype else stored.code)
    return source_dtype(stored, dtype)


def report_loaded(plan: LoadPlan, loaded: LoadedWeights, *, name: str, made: Sequence[str] = ()) -> None:
    """Tell the user on rank 0 what was loaded, and everything that does not go without saying.

    Args:
        plan: What was where.
        loaded: What rank 0 did.
        name: The model's class.
        made: Names that no file held.
    """
    amount = "sent by rank 0" if plan.files.pickled else f"{size_words(loaded.nbytes)} read by rank 0"
    words = [f"{name}: {loaded.tensors} tensors from {plan.where}, {amount} in {loaded.seconds:.1f} s"]
    if plan.match.prefix:
        words.append(f"names with {plan.match.prefix}")
    left_over = [*plan.match.unexpected, *plan.match.passed]
    if left_over:
        words.append(f"left out of the files: {listed(left_over, _NAMES_SHOWN)}")
    if made:
        words.append(f"not in the files: {listed(made, _NAMES_SHOWN)}")
    messages.say("; ".join(words))
