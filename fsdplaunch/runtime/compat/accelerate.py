"""What accelerate needs so that its scripts shard as the file says, with and without GPUs.

Imported when something imports accelerate or transformers. Each function stands for one of accelerate's, gets it
first, and says what goes wrong without.
"""

import functools
import importlib
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from fsdplaunch.config.environment import decode
from fsdplaunch.errors import ShardingError
from fsdplaunch.features import LAYERS, feature
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.collectives.rank_group import RankGroup
from fsdplaunch.runtime.data_loaders import check_divisible
from fsdplaunch.runtime.messages import script_line
from fsdplaunch.runtime.patch import own_attribute, wrap_once_imported
from fsdplaunch.runtime.sharding.compute import keep_no_cache
from fsdplaunch.runtime.sharding.mesh import TENSOR
from fsdplaunch.runtime.torch_internals.modules import is_persistent, own_buffers, put_tensor, set_persistent

if TYPE_CHECKING:
    from fsdplaunch.runtime.tensor_parallel.plan import SplitPlan

_ACCELERATOR, _STATE = "accelerate.accelerator", "accelerate.state"


def adapt_accelerate(*, keeps: bool, on_cpu: bool) -> None:
    """Adapt accelerate, if and when the script imports it.

    Args:
        keeps: Whether the global batch is kept.
        on_cpu: Whether this worker computes on the CPU.
    """
    wrap_once_imported("accelerate.utils.fsdp_utils", "fsdp2_prepare_auto_wrap_policy", _without_embeddings)
    wrap_once_imported(_ACCELERATOR, "fsdp2_prepare_model", _prepare_with_buffers)
    wrap_once_imported(_ACCELERATOR, "Accelerator.prepare", _prepare_without_cache)
    wrap_once_imported(_ACCELERATOR, "Accelerator.register_save_state_pre_hook", _register_save_hook)
    wrap_once_imported("transformers.modeling_utils", "PreTrainedModel.from_pretrained", _load_in_full)
    wrap_once_imported(_ACCELERATOR, "Accelerator.prepare", _prepare_and_compare)
    wrap_once_imported(_ACCELERATOR, "Accelerator._prepare_tp", _split)
    if keeps:
        _switch_on("split_batches", _DIVIDES)
        wrap_once_imported(_ACCELERATOR, "Accelerator.prepare_data_loader", _refuse_indivisible)
    if on_cpu:
        adapt_accelerate_to_cpu()


def adapt_accelerate_to_cpu() -> None:
    """Have what the file sets for sharding done by accelerate without a GPU; for workers on the CPU.

    There `Accelerator()` takes itself for a single process: every rank would train a full model of its own, and
    nothing would report it. And of FSDP1 two options that torch refuses on a CPU are carried out here: sending
    rank 0's values (`sync_module_states`), and offloading, which has nothing to do where parameters are in host
    memory anyway.
    """
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    wrap_once_imported(_STATE, "PartialState._prepare_backend", _prepare_gloo)
    plugins = "accelerate.utils.dataclasses"
    wrap_once_imported(plugins, "FullyShardedDataParallelPlugin.__post_init__", _finish_without_device)
    wrap_once_imported(_ACCELERATOR, "Accelerator.prepare_model", _prepare_on_cpu)
    wrap_once_imported(_ACCELERATOR, "Accelerator._prepare_cp", _refuse_split_sequences)


def keep_accelerate_on_cpu() -> None:
    """Have accelerate's state know from its first use that the run is on the CPU, where it does not shard.

    It reads ACCELERATE_USE_CPU in `Accelerator` and the Trainer only. A script's `PartialState()`, if it came
    first, would make every worker a single process.
    """
    wrap_once_imported(_STATE, "PartialState.__init__", _construct_on_cpu)


def _construct_on_cpu(construct: Any, self: Any, cpu: bool = False, **kwargs: Any) -> None:  # noqa: ARG001
    construct(self, cpu=True, **kwargs)


def shuffle_alike_of_accelerate() -> None:
    """Have every Accelerator shuffle by the seed alone, whatever the number of ranks.

    It shuffles by other numbers over ranks than in one process, so that two runs that are compared would never
    train the same rows.
    """
    _switch_on("use_seedable_sampler")


def _prepare_with_buffers(prepare: Any, accelerator: Any, model: nn.Module) -> nn.Module:
    """Let accelerate shard models whose state has buffers (BatchNorm's), or parameters that no layer holds.

    With `cpu_ram_efficient_loading` it takes each entry of the state for a shard, and ends with an AttributeError
    at the first buffer (1.15). A parameter of the model itself (a ViT's `cls_token`) it looks for in the layer
    before the dot of its name, ending in a ValueError, unless the model has transformers' method for that.
    """
    prepared: nn.Module
    if not getattr(accelerator.state.fsdp_plugin, "cpu_ram_efficient_loading", False):
        prepared = prepare(accelerator, model)
        return prepared

    def load(state: Any, **kwargs: Any) -> Any:  # old BatchNorms' buffers are taken to be missing
        return type(model).load_state_dict(model, state, **kwargs, strict=False)

    def find(name: str) -> Any:
        layer, _, attribute = name.rpartition(".")
        return getattr(model.get_submodule(layer), attribute)

    own_find = getattr(model, "get_parameter_or_buffer", find)
    with (
        _out_of_states(model) as buffers,
        own_attribute(model, "load_state_dict", load),
        own_attribute(model, "get_parameter_or_buffer", own_find),
    ):
        prepared = prepare(accelerator, model)
    values = [getattr(owner, attribute) for owner, attribute in buffers]
    RankGroup([dist.group.WORLD], accelerator.device).send(*values)  # ranks but the first may have read none
    return prepared


@contextmanager
def _out_of_states(model: nn.Module) -> Iterator[list[tuple[nn.Module, str]]]:
    """Take a model's buffers out of its state meanwhile; give the modules and attributes that have them."""
    found = [
        (owner, attribute)
        for owner in model.modules()
        for attribute, _ in own_buffers(owner)
        if is_persistent(owner, attribute)
    ]
    for owner, attribute in found:
        set_persistent(owner, attribute, persistent=False)
        buffer = getattr(owner, attribute).contiguous()
        put_tensor(owner, attribute, torch.empty_like(buffer, device="cpu") if buffer.is_meta else buffer)
    try:
        yield found
    finally:
        for owner, attribute in found:
            set_persistent(owner, attribute, persistent=True)


def _prepare_without_cache(prepare: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Let models of transformers train under the activation checkpointing that accelerate applies.

    They keep keys and values of attention, and a block that is computed again appends to them again: torch finds
    that tensors differ. transformers' Trainer turns that off from version 5 on.
    """
    if getattr(getattr(self.state, "fsdp_plugin", None), "activation_checkpointing", False):
        for model in (each for each in args if isinstance(each, nn.Module)):
            keep_no_cache(model)
    return prepare(self, *args, **kwargs)


class _SavedAsShards(list[Any]):
    """No states, of which one may be taken all the same."""

    def pop(self, *args: Any) -> Any:
        """Return None where nothing is left."""
        return super().pop(*args) if self else None


def _register_save_hook(register: Any, self: Any, hook: Callable[..., Any]) -> Any:
    """Let save hooks take away states that accelerate does not give them for FSDP.

    Such a hook saves each model in a way of its own and takes its state from a list, `weights.pop()`, so that it
    is not saved again. What FSDP has sharded accelerate saves itself, before, and the list is empty.
    """

    @functools.wraps(hook)
    def save_hook(models: Any, weights: list[Any], output_dir: Any) -> Any:
        return hook(models, weights or _SavedAsShards(), output_dir)

    return register(self, save_hook)


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
            messages.say(f"accelerate: {name} is not a unit, because the input embeddings inside of it are one")
        return not around

    return wraps


_DIVIDES = (
    "keep_global_batch: accelerate divides each batch over the ranks (split_batches); not as in one process are\n"
    "  dropout and noise, which each rank draws for its own rows, losses that are not a mean over the batch,\n"
    "  and the order of shuffled rows without use_seedable_sampler (DataLoaderConfiguration's; Trainers set it)"
)


def _switch_on(option: str, announcement: str = "") -> None:
    """Switch on an option of every Accelerator's DataLoaderConfiguration, and print that it was."""

    def build_with_option(build: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        if option not in kwargs:  # older versions take it there
            known = sys.modules[_ACCELERATOR].DataLoaderConfiguration
            loaders = kwargs.get("dataloader_config") or known()
            setattr(loaders, option, True)
            kwargs["dataloader_config"] = loaders
        build(self, *args, **kwargs)
        if announcement:
            messages.say(announcement)

    wrap_once_imported(_ACCELERATOR, "Accelerator.__init__", build_with_option)


def _refuse_indivisible(prepare: Any, self: Any, loader: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse a batch that cannot be divided: accelerate would name an option that the script has not set."""
    check_divisible(getattr(loader, "batch_size", None), self.num_processes, script_line())
    return prepare(self, loader, *args, **kwargs)


def _prepare_gloo(_original: Any, *_: Any, **__: Any) -> tuple[str, Any]:
    """Return the backend and kind of run; accelerate considers FSDP only where an accelerator is named."""
    return "gloo", sys.modules[_STATE].DistributedType.MULTI_GPU


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
    """Refuse what torch cannot compute: it splits the sequences of accelerate's scripts.

    Raises:
        ShardingError: Always.
    """
    size = self.parallelism_config.cp_size
    msg = (
        f"accelerate splits sequences (cp_size {size}) by torch's ring attention, which has no kernel for the CPU"
    )
    raise ShardingError(msg, hint="run it on GPUs; fsdplaunch.prepare splits sequences on the CPU, too")


def _prepare_on_cpu(prepare: Any, self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Prepare with the two options off that torch's FSDP1 refuses on a CPU, and on again in the plugin after."""
    plugin = getattr(self.state, "fsdp_plugin", None)
    if plugin is None or plugin.fsdp_version != 1:
        return prepare(self, model, *args, **kwargs)
    from fsdplaunch.runtime.compat.fsdp1 import send_from_rank_0  # only where it is used
    from fsdplaunch.runtime.inspection.units import fsdp1_wrappers

    if plugin.sync_module_states and not fsdp1_wrappers(model):
        send_from_rank_0(model)
    if plugin.cpu_offload is not None and plugin.cpu_offload.offload_params:
        messages.say("parameters are in host memory already: offloading has nothing to do here")
    with own_attribute(plugin, "sync_module_states", False), own_attribute(plugin, "cpu_offload", None):
        return prepare(self, model, *args, **kwargs)


# Scripts that split layers give `from_pretrained` the Accelerator's mesh and `tp_plan="auto"`, and `prepare`
# shards what comes back over the mesh's other axes. Newer versions of transformers make a mesh of their own
# instead, of all processes, and have no `ReplicateParallel`, which accelerate imports. With these the model is
# loaded in full here, and `prepare` splits it as `fsdplaunch.prepare` does.

_MISSING = "ReplicateParallel"
_plans: "weakref.WeakKeyDictionary[nn.Module, SplitPlan]" = weakref.WeakKeyDictionary()
"""How models are split that are not sharded yet."""


def _splits_here() -> bool:
    """Return whether the installed transformers lacks what accelerate splits layers with."""
    try:
        styles = importlib.import_module("transformers.integrations.tensor_parallel")
    except ImportError:
        return False
    return not hasattr(styles, _MISSING)


def _load_in_full(load: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Have `from_pretrained` leave the layers of a mesh that has an axis for them to `prepare`."""
    mesh: Any = kwargs.get("device_mesh")
    names = getattr(mesh, "mesh_dim_names", None) or ()
    if TENSOR not in names or not _splits_here():
        return load(cls, *args, **kwargs)
    plan = kwargs.pop("tp_plan", None)
    if plan not in (None, "auto"):
        msg = "from_pretrained is given a tp_plan of its own, which this version of transformers keeps to itself"
        raise ShardingError(msg, hint='write it as sharding.tensor_parallel_plan, and give tp_plan="auto"')
    kwargs.pop("tp_size", None)
    model = load(cls, *args, **{name: value for name, value in kwargs.items() if name != "device_mesh"})
    model._tp_size = mesh[TENSOR].size()
    return model


def _split(prepare_tp: Any, self: Any, *args: Any) -> Any:
    """Have `Accelerator.prepare` split layers before it shards."""
    if not _splits_here() or not any(_is_full(each) for each in args):
        return prepare_tp(self, *args)
    _check(self)
    first = [each if isinstance(each, nn.Module) else self._prepare_one(each, first_pass=True) for each in args]
    result = [each if isinstance(each, nn.Module) else self._prepare_one(each) for each in first]
    exchanged = {old: new for model in result if _is_full(model) for old, new in _split_model(model, self)}
    for group in _groups(result):
        group["params"] = [exchanged.get(param, param) for param in group["params"]]
    return result


def _prepare_and_compare(prepare: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Compare the first pass of what was split with the same one unsplit."""
    result = prepare(self, *args, **kwargs)
    for model in (each for each in args if isinstance(each, nn.Module)):
        plan = _plans.pop(model, None)
        if plan is not None:
            _expect(plan, model, self)
    return result


def _is_full(model: Any) -> bool:
    from fsdplaunch.runtime.inspection.units import has_shards

    return isinstance(model, nn.Module) and not has_shards(model)


def _check(accelerator: Any) -> None:
    """Refuse a mesh over which accelerate cannot shard, and let it shard models that are split.

    Raises:
        ShardingError: It would shard over no ranks.
    """
    plugin, sizes = getattr(accelerator.state, "fsdp_plugin", None), accelerator.parallelism_config
    if plugin is None:
        return
    if not sizes.dp_shard_cp_dim_names:
        msg = "accelerate cannot shard over dp_shard_size x cp_size: both are 1, and tp_size is all there is"
        raise ShardingError(msg, hint="set dp_shard_size to 2 or more, or use fsdplaunch.prepare instead")
    plugin.cpu_ram_efficient_loading = False  # rank 0's values are sent here, before layers are split


def _split_model(model: nn.Module, accelerator: Any) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """Split a model's layers; yield each parameter that it had with the one that it has instead."""
    from fsdplaunch.runtime.collectives.rank_group import RankGroup
    from fsdplaunch.runtime.inspection.parameters import model_tensors

    axis = accelerator.torch_device_mesh[TENSOR]
    plan: SplitPlan = feature(LAYERS).split_layers(model, dict(decode().sharding.tensor_parallel_plan), axis)
    ranks = RankGroup()
    for entry in model_tensors(model):
        old = entry.tensor
        old.data = old.data.to(_kept_in(old, accelerator)).contiguous()
        ranks.send(old.data)
        plan.split_parameter(entry)
        if entry.tensor is not old:
            yield old, entry.tensor  # type: ignore[misc]
    _plans[model] = plan
    messages.say(f"accelerate: layers split over {axis.size()} ranks, by {plan.origin}")


def _kept_in(tensor: "torch.Tensor", accelerator: Any) -> "torch.dtype":
    """Return the dtype that accelerate gives a parameter when it shards; it cannot do so when that is split."""
    raised = accelerator.is_fsdp2 and accelerator.mixed_precision != "no"
    return torch.float32 if raised and tensor.requires_grad else tensor.dtype


def _groups(prepared: list[Any]) -> Iterator[dict[str, Any]]:
    from torch.optim import Optimizer

    for each in prepared:
        if isinstance(each, Optimizer):
            yield from each.param_groups


def _expect(plan: "SplitPlan", model: nn.Module, accelerator: Any) -> None:
    policy = getattr(getattr(accelerator.state, "fsdp_plugin", None), "mixed_precision_policy", None)
    plan.expect_same_inputs(model, accelerator.device, getattr(policy, "param_dtype", None))
