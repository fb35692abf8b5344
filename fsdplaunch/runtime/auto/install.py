"""Install all hooks of one worker."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from fsdplaunch.runtime.auto.batch.loaders import identical_across_ranks, sharing_loaders
from fsdplaunch.runtime.auto.batch.streams import seeding_ranks
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.ddp import sharding_replicas
from fsdplaunch.runtime.auto.model.adopt_models import sharding_models
from fsdplaunch.runtime.auto.model.forward_backward import watching_backward
from fsdplaunch.runtime.auto.model.parameters import refusing_renames, showing_shards
from fsdplaunch.runtime.auto.rank0.position import tracking_position
from fsdplaunch.runtime.auto.rank0.service import giving_full_states
from fsdplaunch.runtime.auto.saves import saving_as_one_process
from fsdplaunch.runtime.auto.torch_calls import computing_with_given_tensors, refusing_collectives, stepping_shards
from fsdplaunch.runtime.auto.torch_function import computing_with_shards
from fsdplaunch.runtime.sharding.optimizers import stepping_with_local_shards


@contextmanager
def hooks(hook_context: HookContext) -> Iterator[HookContext]:
    """Install the hooks of one worker, in any order, and take them away at the end."""
    contexts = (
        # The model: shard it where it is first compiled, moved, given to an optimizer or trained.
        sharding_models(hook_context),
        # The model: what a script took from it before stands for its shards; these keep their names.
        refusing_renames(hook_context),
        # A shard: outside of passes `parameters()` gives shards, never what is gathered for a pass.
        showing_shards(hook_context),
        # A shard: `functional_call` computes with the tensors that it is given.
        computing_with_given_tensors(hook_context),
        # The model: the steps of torch's optimizers compute on local shards.
        stepping_with_local_shards(),
        # A shard: gradients are placed before a step, and clipped by their full norm.
        stepping_shards(hook_context),
        # DDP scripts: what they give to DistributedDataParallel is sharded.
        sharding_replicas(hook_context),
        # The batch: gradients that torch would lose are computed; a divided pass draws alike when computed again.
        watching_backward(hook_context),
        # The batch: a loader gives each worker its share, or all of them the global batch.
        sharing_loaders(hook_context),
        # Random numbers: alike until training begins, then by the batch's meaning; seeded, never patched.
        seeding_ranks(hook_context.streams, hook_context.size),
        # The batch: what ranks decide by, running statistics and validation losses, is the same on all.
        identical_across_ranks(hook_context),
        # A shard reads as its full value, is written by its full shape and stays local with other shards.
        computing_with_shards(hook_context),
        # A shard is not exchanged by the script: it is averaged already.
        refusing_collectives(hook_context),
        # Files: rank 0 has the working tree, and saves hold full tensors.
        saving_as_one_process(hook_context),
        # Rank 0 alone: what it asks for belongs to the step that the script is at.
        tracking_position(hook_context),
        # Rank 0 alone: it gets full states; other workers answer where they wait for it.
        giving_full_states(),
    )
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield hook_context
