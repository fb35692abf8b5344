"""Everything that torch's own FSDP, accelerate and transformers need from us in a run that shards."""

from fsdplaunch.config.schema.config import Config
from fsdplaunch.runtime.compat.accelerate.buffers import keep_buffers_for_accelerate
from fsdplaunch.runtime.compat.accelerate.cache import keep_no_cache_for_accelerate
from fsdplaunch.runtime.compat.accelerate.cpu import adapt_accelerate_to_cpu
from fsdplaunch.runtime.compat.accelerate.hooks import let_save_hooks_take_states
from fsdplaunch.runtime.compat.accelerate.layers import split_layers_for_accelerate
from fsdplaunch.runtime.compat.accelerate.loaders import divide_batches_of_accelerate
from fsdplaunch.runtime.compat.accelerate.units import keep_embeddings_out_of_blocks
from fsdplaunch.runtime.compat.checkpoint_calls import checkpoint_with_all_ranks
from fsdplaunch.runtime.compat.fsdp1_calls import answer_fsdp1_calls
from fsdplaunch.runtime.compat.fsdp1_cpu import shard_on_cpu, take_out_offload_to_cpu
from fsdplaunch.runtime.compat.fsdp1_gathering import gather_with_all_ranks
from fsdplaunch.runtime.compat.full_saves import save_full_weights
from fsdplaunch.runtime.compat.import_hook import once_imported
from fsdplaunch.runtime.compat.lightning_cpu import adapt_lightning_to_cpu
from fsdplaunch.runtime.compat.trainer_loss import watch_loss
from fsdplaunch.runtime.compat.zero_grad import clear_gradients_of_shards


def adapt_libraries(config: Config, *, on_cpu: bool) -> None:
    """Adapt torch now, and other libraries if and when the script imports them.

    Args:
        config: The worker's.
        on_cpu: Whether it computes on the CPU.
    """
    save_full_weights()
    keep_embeddings_out_of_blocks()
    keep_buffers_for_accelerate()
    keep_no_cache_for_accelerate()
    let_save_hooks_take_states()
    split_layers_for_accelerate()
    once_imported("transformers.trainer", watch_loss)
    if config.launch.keep_global_batch:
        divide_batches_of_accelerate()
    if on_cpu:
        adapt_accelerate_to_cpu()
        adapt_lightning_to_cpu()
        take_out_offload_to_cpu()
        shard_on_cpu()
    answer_fsdp1_calls()
    gather_with_all_ranks()
    checkpoint_with_all_ranks()
    clear_gradients_of_shards()
