"""What accelerate needs so that its scripts shard as the file says, with and without GPUs.

Imported when something imports accelerate or transformers. Each function stands for one of accelerate's, gets it
first, and says what goes wrong without.
"""

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdplaunch.display_text import short_count
from fsdplaunch.errors import CheckpointError, ShardingError
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.collectives.rank_group import RankGroup
from fsdplaunch.runtime.data_loaders import check_divisible
from fsdplaunch.runtime.inspection import clean_name, named_parameters, parameters_of, tied_names, unwrapped
from fsdplaunch.runtime.inspection.units import is_sharded, is_unit
from fsdplaunch.runtime.messages import script_line
from fsdplaunch.runtime.patch import own_attribute, wrap_once_imported
from fsdplaunch.runtime.sharding.compute import keep_no_cache
from fsdplaunch.runtime.sharding.registry import keep_equal
from fsdplaunch.runtime.sharding.wrap import class_name
from fsdplaunch.runtime.state_dict.full_state import tied_in_flat
from fsdplaunch.runtime.torch_internals.fsdp import is_in_flat_parameter, param_groups
from fsdplaunch.runtime.torch_internals.modules import is_persistent, own_buffers, put_tensor, set_persistent

_ACCELERATOR, _STATE = "accelerate.accelerator", "accelerate.state"
_UTILS = "accelerate.utils.fsdp_utils"


def adapt_accelerate(*, keeps: bool, on_cpu: bool) -> None:
    """Adapt accelerate once it is imported, for a global batch that the run keeps and for workers on the CPU."""
    wrap_once_imported(_UTILS, "fsdp2_prepare_auto_wrap_policy", _without_embeddings)
    wrap_once_imported(_ACCELERATOR, "fsdp2_prepare_model", _prepare_with_buffers)
    wrap_once_imported(_ACCELERATOR, "Accelerator.prepare", _prepare)
    wrap_once_imported(_ACCELERATOR, "Accelerator.clip_grad_norm_", _clip_grad_norm)
    wrap_once_imported(_ACCELERATOR, "Accelerator.register_save_state_pre_hook", _register_save_hook)
    wrap_once_imported("accelerate.scheduler", "AcceleratedScheduler.step", _step_and_compare)
    wrap_once_imported(_UTILS, "_get_model_state_dict", _get_adapters)
    wrap_once_imported(_UTILS, "_set_model_state_dict", _set_adapters)
    for user in (_ACCELERATOR, "transformers.trainer"):
        wrap_once_imported(user, "load_fsdp_optimizer", _load_optimizer)
    if keeps:
        _switch_on("split_batches", _DIVIDES)

        def refuse_indivisible(prepare: Any, self: Any, loader: Any, *args: Any, **kwargs: Any) -> Any:
            check_divisible(getattr(loader, "batch_size", None), self.num_processes, script_line())
            return prepare(self, loader, *args, **kwargs)

        # Accelerate would name an option that the script has not set.
        wrap_once_imported(_ACCELERATOR, "Accelerator.prepare_data_loader", refuse_indivisible)
    if on_cpu:
        adapt_accelerate_to_cpu()


def adapt_accelerate_to_cpu() -> None:
    """Have what the file sets for sharding done by accelerate without a GPU; for workers on the CPU.

    There `Accelerator()` takes itself for a single process: every rank would train a full model of its own, and
    nothing would report it. What torch's FSDP1 refuses on a CPU is seen to where it is built, whoever calls it.
    """
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"

    def prepare_gloo(_original: Any, *_: Any, **__: Any) -> tuple[str, Any]:
        # FSDP is for accelerators only, by their name.
        return "gloo", sys.modules[_STATE].DistributedType.MULTI_GPU

    wrap_once_imported(_STATE, "PartialState._prepare_backend", prepare_gloo)
    plugins = "accelerate.utils.dataclasses"
    wrap_once_imported(plugins, "FullyShardedDataParallelPlugin.__post_init__", _finish_without_device)
    wrap_once_imported(_ACCELERATOR, "Accelerator._prepare_cp", _refuse_split_sequences)


def keep_accelerate_on_cpu() -> None:
    """Have accelerate's state know from its first use that the run is on the CPU, where it does not shard.

    It reads ACCELERATE_USE_CPU in `Accelerator` and the Trainer only. A script's `PartialState()`, if it came
    first, would make every worker a single process.
    """

    def construct_on_cpu(construct: Any, self: Any, cpu: bool = False, **kwargs: Any) -> None:  # noqa: ARG001
        construct(self, cpu=True, **kwargs)

    wrap_once_imported(_STATE, "PartialState.__init__", construct_on_cpu)


def shuffle_alike_of_accelerate() -> None:
    """Have every Accelerator shuffle by the seed alone, whatever the number of ranks.

    It shuffles by other numbers over ranks than in one process, so that two runs that are compared would never
    train the same rows.
    """
    _switch_on("use_seedable_sampler")


def _prepare_with_buffers(prepare: Any, accelerator: Any, model: nn.Module) -> Any:
    """Let accelerate shard models whose state has buffers (BatchNorm's), or parameters that no layer holds.

    With `cpu_ram_efficient_loading` it moves the model to the meta device, where modules to ignore are no longer
    found by their parameters: then rank 0's values are sent before, and it does without. Else it takes each entry
    of the state for a shard, and ends with an AttributeError at the first buffer (1.15). A parameter of the model
    itself (a ViT's `cls_token`) it looks for in the layer before the dot of its name: a ValueError, unless
    the model has transformers' method for that. And what is tied it ties again by such a method alone.
    """
    plugin: Any = accelerator.state.fsdp_plugin
    if not plugin.cpu_ram_efficient_loading or any(map(is_sharded, model.modules())):  # by an evaluation before
        return prepare(accelerator, model)
    if plugin.ignored_modules is not None:
        from fsdplaunch.runtime.compat.fsdp1 import send_from_rank_0  # only where it is used

        send_from_rank_0(model)
        with own_attribute(plugin, "cpu_ram_efficient_loading", False):
            return prepare(accelerator, model)

    def load(state: Any, **kwargs: Any) -> Any:  # old BatchNorms' buffers are taken to be missing
        return type(model).load_state_dict(model, state, **kwargs, strict=False)

    own_find = getattr(model, "get_parameter_or_buffer", functools.partial(_tensor_at, model))
    own_tie = getattr(model, "tie_weights", functools.partial(_tie, model, tied_names(model)))
    # Buffers are out of the model's state meanwhile.
    owners = [
        (owner, name) for owner in model.modules() for name, _ in own_buffers(owner) if is_persistent(owner, name)
    ]
    for owner, name in owners:
        set_persistent(owner, name, persistent=False)
        buffer = getattr(owner, name).contiguous()
        put_tensor(owner, name, torch.empty_like(buffer, device="cpu") if buffer.is_meta else buffer)
    try:
        with (
            own_attribute(model, "load_state_dict", load),
            own_attribute(model, "get_parameter_or_buffer", own_find),
            own_attribute(model, "tie_weights", own_tie),
        ):
            prepared = prepare(accelerator, model)
    finally:
        for owner, name in owners:
            set_persistent(owner, name, persistent=True)
    values = [getattr(owner, name) for owner, name in owners]
    RankGroup([dist.group.WORLD], accelerator.device).send(*values)  # ranks but the first may have read none
    return prepared


def _tensor_at(model: nn.Module, name: str) -> Any:
    layer, _, attribute = name.rpartition(".")
    return getattr(model.get_submodule(layer), attribute)


def _tie(model: nn.Module, tied: tuple[tuple[str, ...], ...]) -> None:
    for first, *others in tied:
        for layer, _, attribute in (name.rpartition(".") for name in others):
            put_tensor(model.get_submodule(layer), attribute, _tensor_at(model, first))


def _prepare(prepare: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Let models of transformers train under activation checkpointing, and keep equal what is not sharded.

    They keep keys and values of attention, and a block that is computed again appends to them again: torch finds
    that tensors differ. transformers' Trainer turns that off from version 5 on. And torch leaves gradients of
    parameters that are not sharded (`fsdp_ignored_modules`) as each rank has computed them.
    """
    models = [each for each in args if isinstance(each, nn.Module)]
    if getattr(getattr(self.state, "fsdp_plugin", None), "activation_checkpointing", False):
        for model in models:
            keep_no_cache(model)
    if len(models) > 1 and getattr(self, "is_fsdp2", False):
        return _prepare_each_model(prepare, self, models, args, **kwargs)
    result = prepare(self, *args, **kwargs)
    for model in _as_tuple(result):
        if isinstance(model, nn.Module) and any(map(is_sharded, model.modules())):
            _check_dtypes(model)
            _keep_unsharded_equal(model)
    return result


def _prepare_each_model(
    prepare: Any, self: Any, models: list[nn.Module], args: tuple[Any, ...], **kwargs: Any
) -> Any:
    """Prepare models one by one, each with its own optimizers: accelerate takes one model under FSDP2."""
    rest = [each for each in args if not isinstance(each, nn.Module)]
    ready: dict[int, Any] = {}
    for model in models:
        own = set(map(id, parameters_of(model)))
        its = [
            each
            for each in rest
            if isinstance(each, Optimizer)
            if any(id(param) in own for group in each.param_groups for param in group["params"])
        ]
        rest = [each for each in rest if each not in its]
        ready |= zip(
            map(id, (model, *its)), _as_tuple(_prepare(prepare, self, model, *its, **kwargs)), strict=True
        )
    if rest:
        ready |= zip(map(id, rest), _as_tuple(prepare(self, *rest)), strict=True)
    return tuple(ready[id(each)] for each in args)


def _as_tuple(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def _check_dtypes(model: nn.Module) -> None:
    """Refuse units of FSDP2 with trained parameters of several dtypes, which torch does without a name."""
    names = {id(param): name for name, param in named_parameters(model)}
    for name, unit in model.named_modules():
        for group in param_groups(unit) if is_unit(unit) else ():
            shards = [each.sharded_param for each in group.fsdp_params if each.sharded_param.requires_grad]
            by_dtype = {str(shard.dtype).removeprefix("torch."): names.get(id(shard), "") for shard in shards}
            if len(by_dtype) > 1:
                found = " and ".join(f"{param} in {dtype}" for dtype, param in by_dtype.items())
                msg = f"{script_line()}: {clean_name(name) or class_name(model)} has {found}: FSDP2 takes one"
                hint = "set mixed_precision, convert the model to one dtype, or use fsdplaunch.prepare"
                raise ShardingError(msg, hint=hint)


def _keep_unsharded_equal(model: nn.Module) -> None:
    alone = [
        param
        for param in parameters_of(model)
        if param.requires_grad and not isinstance(param, DTensor) and not is_in_flat_parameter(param)
    ]
    if not (size := keep_equal(alone, None)):
        return
    from fsdplaunch.runtime.sharding.optimizers import step_with_local_shards

    step_with_local_shards()  # torch's loops over many parameters take no plain ones beside shards
    size_text = short_count(size)
    messages.say(
        f"accelerate: {size_text} parameters are not sharded (fsdp_ignored_modules): gradients are averaged"
    )


def _clip_grad_norm(clip: Any, self: Any, parameters: Any, max_norm: Any, norm_type: Any = 2) -> Any:
    """Clip gradients of shards and of what is not sharded by one norm, which accelerate 1.12 cannot."""
    if not getattr(self, "is_fsdp2", False):
        return clip(self, parameters, max_norm, norm_type)
    from fsdplaunch.runtime.api.gradients import clip_grad_norm_  # only where it is used

    self.unscale_gradients()
    return clip_grad_norm_(parameters, max_norm, norm_type)


def _register_save_hook(register: Any, self: Any, hook: Callable[..., Any]) -> Any:
    """Let save hooks take away states that accelerate does not give them for FSDP.

    Such a hook saves each model in a way of its own and takes its state from a list, `weights.pop()`, so that it
    is not saved again. What FSDP has sharded accelerate saves itself, before, and the list would be empty.
    """

    @functools.wraps(hook)
    def save_hook(models: Any, weights: list[Any], output_dir: Any) -> Any:
        return hook(models, weights or [None] * len(models), output_dir)

    return register(self, save_hook)


def _has_adapters(model: nn.Module) -> bool:
    return isinstance(model, FullyShardedDataParallel) and sys.modules[_UTILS].is_peft_model(model)


def _trained_names(model: nn.Module) -> set[str]:
    every = model.named_parameters(remove_duplicate=False)  # tied ones by each of their names
    return {clean_name(name) for name, param in every if param.requires_grad}


def _get_adapters(get: Any, model: nn.Module, adapter_only: bool = False, **kwargs: Any) -> dict[str, Any]:
    """Return the parameters that an FSDP1 model trains, to save its adapters or to read them.

    PEFT looks for them in modules by the names in the state, and finds none where wrappers stand between:
    accelerate would save nothing, and nothing would be read (accelerate#4206). Of a whole state tied parameters
    share their memory, and are written once.
    """
    if not (adapter_only and _has_adapters(model)):
        state: dict[str, Any] = get(model, adapter_only=adapter_only, **kwargs)
        for first, *others in (*tied_names(model), *tied_in_flat(model)):
            state |= {name: state[first] for name in others if name in state}
        return state
    trained = _trained_names(model)
    return {name: value for name, value in model.state_dict().items() if name in trained}


def _set_adapters(
    put: Any, model: nn.Module, state_dict: dict[str, Any], adapter_only: bool = False, **kwargs: Any
) -> Any:
    """Load what `_get_adapters` returned; everything else stays as it is."""
    if not (adapter_only and _has_adapters(model)):
        return put(model, state_dict, adapter_only=adapter_only, **kwargs)
    if _trained_names(model).isdisjoint(state_dict):
        msg = f"{script_line()}: the checkpoint has none of the parameters that train"
        raise CheckpointError(msg, hint="it was saved without adapters; load one that has them")
    # Of sharded states torch asks for every parameter; of full ones the others' are not there on every rank.
    return model.load_state_dict({**model.state_dict(), **state_dict}, strict=False)


def _load_optimizer(
    load: Any,
    plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: nn.Module,
    input_dir: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Load a sharded state of an optimizer under FSDP1.

    accelerate reads it into what the optimizer has: nothing before its first step, so that training would go on
    without it; and more than was saved where a parameter has fewer elements than ranks (accelerate#3896).
    """
    sharded = plugin.fsdp_version == 1 and plugin.state_dict_type.name == "SHARDED_STATE_DICT"
    if not sharded or not kwargs.get("use_dcp", True):
        load(plugin, accelerator, optimizer, model, input_dir, *args, **kwargs)
        return
    from fsdplaunch.runtime.saving.model_and_optimizer import OPTIMIZER, load_optimizer  # only where it is used

    index = args[0] if args else kwargs.get("optimizer_index", 0)
    folder = Path(input_dir)
    folder = folder.parent if folder.name == f"{OPTIMIZER}_{index}" else folder
    accelerator.wait_for_everyone()
    load_optimizer(unwrapped(model), optimizer, folder, index)


def _without_embeddings(prepare: Any, fsdp2_plugin: Any, model: Any) -> Callable[[Any], bool] | None:
    """Keep accelerate from making a unit of what holds the input embeddings, which are a unit themselves.

    transformers names BertEmbeddings beside BertLayer among the modules not to split. Of the input embeddings
    inside accelerate makes a unit, too, which torch refuses: 'Invariant encountered: value was None'.
    """
    policy = prepare(fsdp2_plugin, model)
    embeddings = getattr(model, "get_input_embeddings", lambda: None)()
    if policy is None or embeddings is None:
        return policy  # type: ignore[no-any-return]
    named: set[str] = set()

    def wraps(module: Any) -> bool:
        if not policy(module):
            return False
        around = module is not embeddings and any(each is embeddings for each in module.modules())
        name = type(module).__name__
        if around and name not in named:
            named.add(name)
            messages.say(f"accelerate: {name} is not a unit, because the input embeddings inside it are one")
        return not around

    return wraps


_named_rates: list[bool] = []


def _step_and_compare(step: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Print once that accelerate advances a schedule of learning rates by as many steps as there are workers."""
    if _named_rates:
        step(self, *args, **kwargs)
        return
    rates: list[float] = []
    advance = self.scheduler.step

    def note(*inner: Any, **more: Any) -> None:
        advance(*inner, **more)
        rates.append(self.scheduler.get_last_lr()[0])

    with own_attribute(self.scheduler, "step", note):
        step(self, *args, **kwargs)
    if len(rates) > 1 and rates[0] != rates[-1]:
        _named_rates.append(True)
        messages.say_unequal(
            f"{script_line()}: accelerate advances the schedule of learning rates {len(rates)} times for a step,"
            f" once for each worker: to {rates[-1]:g}, where one process advances it to {rates[0]:g};"
            " Accelerator(step_scheduler_with_optimizer=False) advances it once"
        )


_DIVIDES = (
    "keep_global_batch: accelerate divides each batch over the ranks (split_batches); these still differ from\n"
    "  one process: dropout and noise, which each rank draws for its own rows, losses that are not a batch mean,\n"
    "  and the order of shuffled rows without use_seedable_sampler (DataLoaderConfiguration's; Trainers set it)"
)


def _switch_on(option: str, announcement: str = "") -> None:
    """Switch on an option of every Accelerator's DataLoaderConfiguration, and print that it was."""

    def build_with_option(build: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        loaders = kwargs.get("dataloader_config") or sys.modules[_ACCELERATOR].DataLoaderConfiguration()
        setattr(loaders, option, True)
        kwargs["dataloader_config"] = loaders
        build(self, *args, **kwargs)
        if announcement:
            messages.say(announcement)

    wrap_once_imported(_ACCELERATOR, "Accelerator.__init__", build_with_option)


def _finish_without_device(finish: Any, self: Any) -> None:
    """Let accelerate's plugin be built, which ends by choosing the accelerator for `sync_module_states`.

    Every field is set by then. The function it would have made is not needed: the values are sent here.
    """
    try:
        finish(self)
    except RuntimeError as failure:
        if not self.sync_module_states or "no available devices" not in str(failure):
            raise


def _refuse_split_sequences(_original: Any, self: Any, *_prepared: Any) -> Any:
    """Refuse what torch cannot compute: it splits the sequences of accelerate's scripts."""
    size = self.parallelism_config.cp_size
    msg = (
        f"accelerate splits sequences (cp_size {size}) by torch's ring attention, which has no kernel for the CPU"
    )
    raise ShardingError(msg, hint="run it on GPUs; fsdplaunch.prepare splits sequences on the CPU, too")
