"""Install all hooks of one worker."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.data.cut_batches import telling_cut_batches
from fsdplaunch.runtime.auto.data.data_loaders import dividing_loaders
from fsdplaunch.runtime.auto.data.library_metrics import counting_rows_once
from fsdplaunch.runtime.auto.data.numbered_rows import noting_numbered_rows
from fsdplaunch.runtime.auto.data.row_order import telling_row_orders
from fsdplaunch.runtime.auto.data.row_statistics import telling_row_statistics
from fsdplaunch.runtime.auto.ddp.composable import refusing_replicate
from fsdplaunch.runtime.auto.ddp.construction import sharding_replicas
from fsdplaunch.runtime.auto.ddp.model_averaging import averaging_replicas_only
from fsdplaunch.runtime.auto.ddp.spawned_ranks import running_spawned_ranks
from fsdplaunch.runtime.auto.ddp.zero_redundancy import stepping_shards_plainly
from fsdplaunch.runtime.auto.detect.divided_by_hand import refusing_layers_divided_by_hand
from fsdplaunch.runtime.auto.detect.module_registry import registering_modules
from fsdplaunch.runtime.auto.detect.optimizers import training_shards
from fsdplaunch.runtime.auto.detect.per_sample import refusing_per_sample
from fsdplaunch.runtime.auto.detect.shard_triggers import (
    building_in_host_memory,
    sharding_on_compile,
    sharding_on_move,
)
from fsdplaunch.runtime.auto.detect.training_begins import sharding_when_training_begins
from fsdplaunch.runtime.auto.dtensor.function_table import handling_shards
from fsdplaunch.runtime.auto.dtensor.grad_clipping import clipping_by_full_norm
from fsdplaunch.runtime.auto.dtensor.own_numbers import telling_own_numbers
from fsdplaunch.runtime.auto.losses.first_batches.recording import recording_first_batches
from fsdplaunch.runtime.auto.losses.learning_rates import lowering_rates_alike
from fsdplaunch.runtime.auto.model.backward_hooks import watching_backward
from fsdplaunch.runtime.auto.model.batch_norm import normalising_global_batch
from fsdplaunch.runtime.auto.model.buffers import aligning_buffers
from fsdplaunch.runtime.auto.model.function_transforms import transforming_functions
from fsdplaunch.runtime.auto.model.functional_calls import computing_with_given_tensors
from fsdplaunch.runtime.auto.model.gathered_view import showing_shards
from fsdplaunch.runtime.auto.model.moves import keeping_hooks
from fsdplaunch.runtime.auto.model.renamed_parameters import refusing_renames
from fsdplaunch.runtime.auto.optimizers.local_steps import stepping_with_local_shards
from fsdplaunch.runtime.auto.rng.global_draws import drawing_for_global_batch
from fsdplaunch.runtime.auto.rng.rng_streams import drawing_alike_in_evaluation, seeding_by_rank
from fsdplaunch.runtime.auto.rng.unseeded import seeding_alike
from fsdplaunch.runtime.auto.state.exports import exporting_full_models
from fsdplaunch.runtime.auto.state.files.file_operations import doing_once
from fsdplaunch.runtime.auto.state.files.fresh_folders import keeping_fresh_folders
from fsdplaunch.runtime.auto.state.files.same_operations import counting_for_all
from fsdplaunch.runtime.auto.state.files.written_bytes import writing_bytes_once
from fsdplaunch.runtime.auto.state.files.written_files import writing_once
from fsdplaunch.runtime.auto.state.load_hooks import loading_full_tensors
from fsdplaunch.runtime.auto.state.rank0.copies import remembering_copies
from fsdplaunch.runtime.auto.state.rank0.held_states import holding_states
from fsdplaunch.runtime.auto.state.rank0.made_tensors import remembering_made
from fsdplaunch.runtime.auto.state.rank0.position import counting
from fsdplaunch.runtime.auto.state.save_hooks import saving_full_tensors


@contextmanager
def hooks(hook_context: HookContext, *, alike: bool = True) -> Iterator[HookContext]:
    """Install the hooks of one worker, and take them away at the end.

    Args:
        hook_context: This worker's.
        alike: Whether unseeded generators begin alike on all ranks; not where the script itself runs over ranks.
    """
    contexts = (
        registering_modules(hook_context.module_registry),
        sharding_on_move(hook_context),
        sharding_on_compile(hook_context),
        building_in_host_memory(hook_context),
        keeping_hooks(hook_context),
        refusing_renames(hook_context),
        showing_shards(),
        computing_with_given_tensors(hook_context),
        transforming_functions(hook_context),
        refusing_per_sample(hook_context),
        training_shards(hook_context),
        sharding_when_training_begins(hook_context),
        sharding_replicas(hook_context),
        stepping_shards_plainly(hook_context.ownership),
        stepping_with_local_shards(),
        averaging_replicas_only(hook_context),
        refusing_replicate(hook_context.ownership),
        running_spawned_ranks(),
        dividing_loaders(hook_context),
        counting_rows_once(hook_context),
        aligning_buffers(hook_context),
        seeding_by_rank(hook_context.streams),
        seeding_alike(hook_context.streams, hook_context.size if alike else 1),
        drawing_alike_in_evaluation(hook_context.streams, hook_context.models),
        drawing_for_global_batch(hook_context),
        telling_row_orders(hook_context),
        noting_numbered_rows(hook_context),
        telling_row_statistics(hook_context),
        normalising_global_batch(hook_context),
        watching_backward(hook_context),
        recording_first_batches(hook_context.recorder),
        lowering_rates_alike(hook_context),
        clipping_by_full_norm(hook_context),
        handling_shards(hook_context),
        telling_cut_batches(hook_context),  # reads how its caller goes on: none of ours between
        telling_own_numbers(),
        counting(hook_context.position),
        refusing_layers_divided_by_hand(hook_context),  # sees its caller: none of ours between
        remembering_copies(hook_context.position),
        remembering_made(hook_context.position),
        holding_states(hook_context),
        saving_full_tensors(hook_context),
        keeping_fresh_folders(hook_context),
        writing_once(hook_context),
        writing_bytes_once(hook_context),
        counting_for_all(hook_context.size),
        doing_once(hook_context),
        loading_full_tensors(hook_context),
        exporting_full_models(hook_context),
    )
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield hook_context
