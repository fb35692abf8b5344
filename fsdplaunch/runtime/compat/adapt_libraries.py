"""Everything that torch's own FSDP, accelerate and transformers need from us in a run that shards.

Each part is imported when its library is, or when its class is first built: a script pays for what it uses.
"""

import functools
from typing import Any

from fsdplaunch.config.schema.config import Config
from fsdplaunch.runtime.collectives.hang_detector import watch_main_thread
from fsdplaunch.runtime.compat.checkpoint_calls import checkpoint_with_all_ranks
from fsdplaunch.runtime.compat.fsdp1_calls import answer_fsdp1_calls
from fsdplaunch.runtime.compat.import_hook import before_import, once_imported
from fsdplaunch.runtime.compat.zero_grad import clear_gradients_of_shards
from fsdplaunch.runtime.library_watch import on_sharding

_HUGGING_FACE = ("accelerate", "transformers", "peft", "diffusers", "huggingface_hub")
_LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")


def adapt_libraries(config: Config, *, on_cpu: bool) -> None:
    """Adapt torch now, and other libraries if and when the script imports them.

    Args:
        config: The worker's.
        on_cpu: Whether it computes on the CPU.
    """
    adapt = functools.partial(_adapt_hugging_face, keeps=config.launch.keep_global_batch, on_cpu=on_cpu)
    for package in _HUGGING_FACE:
        before_import(package, adapt)
    for package in _LIGHTNING if on_cpu else ():
        before_import(package, _adapt_lightning)
    checkpoint_with_all_ranks()
    _adapt_fsdp1_when_built(on_cpu=on_cpu)
    answer_fsdp1_calls()
    clear_gradients_of_shards()
    on_sharding(watch_main_thread)  # a call that only some ranks make is told from where the others wait


@functools.cache
def _adapt_hugging_face(*, keeps: bool, on_cpu: bool) -> None:
    from fsdplaunch.runtime.compat.accelerate.buffers import keep_buffers_for_accelerate
    from fsdplaunch.runtime.compat.accelerate.cache import keep_no_cache_for_accelerate
    from fsdplaunch.runtime.compat.accelerate.cpu import adapt_accelerate_to_cpu
    from fsdplaunch.runtime.compat.accelerate.hooks import let_save_hooks_take_states
    from fsdplaunch.runtime.compat.accelerate.layers import split_layers_for_accelerate
    from fsdplaunch.runtime.compat.accelerate.loaders import divide_batches_of_accelerate
    from fsdplaunch.runtime.compat.accelerate.units import keep_embeddings_out_of_blocks
    from fsdplaunch.runtime.compat.full_saves import save_full_weights
    from fsdplaunch.runtime.compat.trainer_loss import watch_loss

    save_full_weights()
    keep_embeddings_out_of_blocks()
    keep_buffers_for_accelerate()
    keep_no_cache_for_accelerate()
    let_save_hooks_take_states()
    split_layers_for_accelerate()
    once_imported("transformers.trainer", watch_loss)
    if keeps:
        divide_batches_of_accelerate()
    if on_cpu:
        adapt_accelerate_to_cpu()


def _adapt_lightning() -> None:
    from fsdplaunch.runtime.compat.lightning_cpu import adapt_lightning_to_cpu

    adapt_lightning_to_cpu()


def _adapt_fsdp1_when_built(*, on_cpu: bool) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel as Wrapper

    build = Wrapper.__init__

    @functools.cache
    def adapted() -> Any:
        now, Wrapper.__init__ = Wrapper.__init__, build  # type: ignore[method-assign]
        _adapt_fsdp1(on_cpu=on_cpu)
        inner, Wrapper.__init__ = Wrapper.__init__, now  # type: ignore[method-assign]
        return inner

    @functools.wraps(build)
    def adapt_and_build(self: Any, *args: Any, **kwargs: Any) -> None:
        adapted()(self, *args, **kwargs)

    Wrapper.__init__ = adapt_and_build  # type: ignore[method-assign]


def _adapt_fsdp1(*, on_cpu: bool) -> None:
    from fsdplaunch.runtime.compat.fsdp1_cpu import shard_on_cpu, take_out_offload_to_cpu
    from fsdplaunch.runtime.compat.fsdp1_gathering import gather_with_all_ranks
    from fsdplaunch.runtime.state_dict.full_state import remember_wrappers

    remember_wrappers()
    if on_cpu:
        take_out_offload_to_cpu()
        shard_on_cpu()
    gather_with_all_ranks()
