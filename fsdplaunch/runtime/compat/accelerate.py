"""What accelerate needs so that its scripts shard as the file says, with and without GPUs.

Imported when something imports accelerate or transformers. Each function adapts one module of accelerate's once
it is imported, and says what goes wrong without.
"""

import functools
import importlib
import os
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
from fsdplaunch.runtime.patch import once_imported, own_attribute
from fsdplaunch.runtime.sharding.mesh import TENSOR
from fsdplaunch.runtime.torch_internals.modules import is_persistent, own_buffers, put_tensor, set_persistent

if TYPE_CHECKING:
    import torch

    from fsdplaunch.runtime.tensor_parallel.plan import SplitPlan


def keep_buffers_for_accelerate() -> None:
    """Keep the buffers of what accelerate shards by FSDP2, if and when the script imports it."""
    once_imported("accelerate.accelerator", _prepare_with_buffers)


def _prepare_with_buffers(module: Any) -> None:
    prepare = getattr(module, "fsdp2_prepare_model", None)
    if prepare is None:
        return

    @functools.wraps(prepare)
    def prepare_with_buffers(accelerator: Any, model: nn.Module) -> nn.Module:
        if not getattr(accelerator.state.fsdp_plugin, "cpu_ram_efficient_loading", False):
            return prepare(accelerator, model)  # type: ignore[no-any-return]
        load, find = (
            functools.partial(_load_without_buffers, model),
            getattr(model, "get_parameter_or_buffer", None),
        )
        with (
            _out_of_states(model) as buffers,
            own_attribute(model, "load_state_dict", load),
            own_attribute(model, "get_parameter_or_buffer", find or functools.partial(_of_name, model)),
        ):
            prepared: nn.Module = prepare(accelerator, model)
        values = [getattr(owner, attribute) for owner, attribute in buffers]
        RankGroup([dist.group.WORLD], accelerator.device).send(*values)  # ranks but the first may have read none
        return prepared

    module.fsdp2_prepare_model = prepare_with_buffers


def _load_without_buffers(model: nn.Module, state: Any, **kwargs: Any) -> Any:
    """Load what accelerate has made of the model's own state: old BatchNorms' buffers are taken to be missing."""
    return type(model).load_state_dict(model, state, **kwargs, strict=False)


def _of_name(model: nn.Module, name: str) -> Any:
    layer, _, attribute = name.rpartition(".")
    return getattr(model.get_submodule(layer), attribute)


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


def keep_no_cache_for_accelerate() -> None:
    """Turn off the cache of what accelerate prepares so, if and when the script imports it."""
    once_imported("accelerate.accelerator", _prepare_without_cache)


def _prepare_without_cache(module: Any) -> None:
    from fsdplaunch.runtime.sharding.compute import keep_no_cache

    kind = module.Accelerator
    prepare = kind.prepare

    @functools.wraps(prepare)
    def prepare_without_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(getattr(self.state, "fsdp_plugin", None), "activation_checkpointing", False):
            for model in (each for each in args if isinstance(each, nn.Module)):
                keep_no_cache(model)
        return prepare(self, *args, **kwargs)

    kind.prepare = prepare_without_cache


def adapt_accelerate_to_cpu() -> None:
    """Adapt accelerate, if and when the script imports it, so that what the file sets for sharding is done.

    For workers whose device is the CPU, before the script runs.
    """
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    once_imported("accelerate.state", _adapt_state)
    once_imported("accelerate.utils.dataclasses", _adapt_plugin)
    once_imported("accelerate.accelerator", _adapt_accelerator)


def keep_accelerate_on_cpu() -> None:
    """Have accelerate's state know from its first use that the run is on the CPU, where it does not shard.

    It reads ACCELERATE_USE_CPU in `Accelerator` and the Trainer only. A script's `PartialState()`, if it came
    first, would make every worker a single process.
    """
    once_imported("accelerate.state", _keep_state_on_cpu)


def _keep_state_on_cpu(state: Any) -> None:
    construct = state.PartialState.__init__

    @functools.wraps(construct)
    def construct_on_cpu(self: Any, cpu: bool = False, **kwargs: Any) -> None:  # noqa: ARG001
        construct(self, cpu=True, **kwargs)

    state.PartialState.__init__ = construct_on_cpu


def _adapt_state(state: Any) -> None:
    """Adapt its state, which considers FSDP only where an accelerator is named; the device is set beside it."""

    def prepare_backend(*_: Any, **__: Any) -> tuple[str, Any]:
        return "gloo", state.DistributedType.MULTI_GPU

    state.PartialState._prepare_backend = prepare_backend


def _adapt_plugin(dataclasses: Any) -> None:
    """Adapt its plugin, whose construction ends by choosing the accelerator for `sync_module_states`.

    Every field is set by then. The function it would have made is not needed: the values are sent here.
    """
    plugin = dataclasses.FullyShardedDataParallelPlugin
    finish = plugin.__post_init__

    @functools.wraps(finish)
    def finish_without_device(self: Any) -> None:
        try:
            finish(self)
        except RuntimeError as failure:
            if not self.sync_module_states or "no available devices" not in str(failure):
                raise

    plugin.__post_init__ = finish_without_device


def _adapt_accelerator(accelerator: Any) -> None:
    prepare = accelerator.Accelerator.prepare_model

    @functools.wraps(prepare)
    def prepare_on_cpu(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        plugin = getattr(self.state, "fsdp_plugin", None)
        if plugin is None or plugin.fsdp_version != 1:
            return prepare(self, model, *args, **kwargs)
        return _with_what_torch_can(plugin, model, lambda: prepare(self, model, *args, **kwargs))

    accelerator.Accelerator.prepare_model = prepare_on_cpu
    if hasattr(accelerator.Accelerator, "_prepare_cp"):  # 1.10 and newer
        accelerator.Accelerator._prepare_cp = _refuse_split_sequences


def _refuse_split_sequences(self: Any, *_prepared: Any) -> Any:
    """Refuse what torch cannot compute: it splits the sequences of accelerate's scripts.

    Raises:
        ShardingError: Always.
    """
    size = self.parallelism_config.cp_size
    msg = (
        f"accelerate splits sequences (cp_size {size}) by torch's ring attention, which has no kernel for the CPU"
    )
    raise ShardingError(msg, hint="run it on GPUs; fsdplaunch.prepare splits sequences on the CPU, too")


def _with_what_torch_can(plugin: Any, model: Any, prepare: Callable[[], Any]) -> Any:
    """Prepare with the two options off that torch's FSDP1 refuses on a CPU, and on again in the plugin after."""
    sync, offload = plugin.sync_module_states, plugin.cpu_offload
    if sync:
        _send_from_rank_0(model)
    if offload is not None and offload.offload_params:
        messages.say("parameters are in host memory already: offloading has nothing to do here")
    plugin.sync_module_states, plugin.cpu_offload = False, None
    try:
        return prepare()
    finally:
        plugin.sync_module_states, plugin.cpu_offload = sync, offload


def _send_from_rank_0(model: Any) -> None:
    from fsdplaunch.runtime.compat.fsdp1 import send_from_rank_0  # imports torch
    from fsdplaunch.runtime.inspection.units import fsdp1_wrappers

    if not fsdp1_wrappers(model):
        send_from_rank_0(model)


def let_save_hooks_take_states() -> None:
    """Adapt accelerate, if and when the script imports it."""
    once_imported("accelerate.accelerator", _register_save_hooks)


class _SavedAsShards(list[Any]):
    """No states, of which one may be taken all the same."""

    def pop(self, *args: Any) -> Any:
        """Return None where nothing is left."""
        return super().pop(*args) if self else None


def _register_save_hooks(module: Any) -> None:
    kind = module.Accelerator
    register = kind.register_save_state_pre_hook

    @functools.wraps(register)
    def register_save_state_pre_hook(self: Any, hook: Callable[..., Any]) -> Any:
        return register(self, _given_what_may_be_taken(hook))

    kind.register_save_state_pre_hook = register_save_state_pre_hook


def _given_what_may_be_taken(hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def save_hook(models: Any, weights: list[Any], output_dir: Any) -> Any:
        return hook(models, weights or _SavedAsShards(), output_dir)

    return save_hook


Policy = Callable[[Any], bool]


def keep_embeddings_out_of_blocks() -> None:
    """Have accelerate's FSDP2 make no unit around the input embeddings, if and when the script imports it."""
    once_imported("accelerate.utils.fsdp_utils", _leave_out_embeddings)


def _leave_out_embeddings(module: Any) -> None:
    prepare = getattr(module, "fsdp2_prepare_auto_wrap_policy", None)
    if prepare is None:  # before FSDP2
        return

    @functools.wraps(prepare)
    def prepare_policy(fsdp2_plugin: Any, model: Any) -> Policy | None:
        policy = prepare(fsdp2_plugin, model)
        embeddings = getattr(model, "get_input_embeddings", lambda: None)()
        return policy if policy is None or embeddings is None else _without(policy, embeddings)

    module.fsdp2_prepare_auto_wrap_policy = prepare_policy


def _without(policy: Policy, embeddings: Any) -> Policy:
    """Return a policy that wraps nothing which holds these embeddings and is not itself them."""
    named: set[str] = set()

    def wraps(module: Any) -> bool:
        if not policy(module):
            return False
        around = module is not embeddings and any(each is embeddings for each in module.modules())
        name = type(module).__name__
        if around and name not in named:
            named.add(name)
            messages.say(f"accelerate: {name} is no unit, for the input embeddings inside of it are one")
        return not around

    return wraps


_DIVIDES = (
    "keep_global_batch: accelerate divides each batch over the ranks (split_batches); not as in one process are\n"
    "  dropout and noise, which each rank draws for its own rows, losses that are no mean over the batch,\n"
    "  and the order of shuffled rows without use_seedable_sampler (DataLoaderConfiguration's; Trainers set it)"
)


def divide_batches_of_accelerate() -> None:
    """Have every Accelerator divide its loaders' batches, if and when the script imports accelerate."""
    _switch_on("split_batches", _DIVIDES)
    once_imported("accelerate.accelerator", _refuse_indivisible)


def _refuse_indivisible(module: Any) -> None:
    """Refuse a batch that cannot be divided: accelerate would name an option that the script has not set."""
    accelerator = module.Accelerator
    prepare = accelerator.prepare_data_loader

    @functools.wraps(prepare)
    def prepare_data_loader(self: Any, loader: Any, *args: Any, **kwargs: Any) -> Any:
        check_divisible(getattr(loader, "batch_size", None), self.num_processes, script_line())
        return prepare(self, loader, *args, **kwargs)

    accelerator.prepare_data_loader = prepare_data_loader


def shuffle_alike_of_accelerate() -> None:
    """Have every Accelerator shuffle by the seed alone, whatever the number of ranks."""
    _switch_on("use_seedable_sampler")


def _switch_on(option: str, announcement: str = "") -> None:
    """Switch on an option of accelerate's DataLoaderConfiguration, and print that it was."""
    once_imported(
        "accelerate.accelerator", functools.partial(_build_with_option, option=option, announcement=announcement)
    )


def _build_with_option(module: Any, *, option: str, announcement: str) -> None:
    accelerator = module.Accelerator
    build = accelerator.__init__

    @functools.wraps(build)
    def build_with_option(self: Any, *args: Any, **kwargs: Any) -> None:
        if option not in kwargs:  # older versions take it there
            loaders = kwargs.get("dataloader_config") or module.DataLoaderConfiguration()
            setattr(loaders, option, True)
            kwargs["dataloader_config"] = loaders
        build(self, *args, **kwargs)
        if announcement:
            messages.say(announcement)

    accelerator.__init__ = build_with_option


_MISSING = "ReplicateParallel"
_split: "weakref.WeakKeyDictionary[nn.Module, SplitPlan]" = weakref.WeakKeyDictionary()
"""How models are split that are not sharded yet."""


def split_layers_for_accelerate() -> None:
    """Adapt accelerate and transformers, if and when the script imports them."""
    once_imported("transformers.modeling_utils", _load_in_full)
    once_imported("accelerate.accelerator", _prepare_split)


def _splits_here() -> bool:
    """Return whether the installed transformers lacks what accelerate splits layers with."""
    try:
        styles = importlib.import_module("transformers.integrations.tensor_parallel")
    except ImportError:
        return False
    return not hasattr(styles, _MISSING)


def _load_in_full(module: Any) -> None:
    """Have `from_pretrained` leave the layers of a mesh that has an axis for them to `prepare`."""
    kind = module.PreTrainedModel
    load = kind.from_pretrained.__func__

    @functools.wraps(load)
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        mesh: Any = kwargs.get("device_mesh")
        names = getattr(mesh, "mesh_dim_names", None) or ()
        if TENSOR not in names or not _splits_here():
            return load(cls, *args, **kwargs)
        plan = kwargs.pop("tp_plan", None)
        if plan not in (None, "auto"):
            msg = (
                "from_pretrained is given a tp_plan of its own, which this version of transformers keeps to itself"
            )
            raise ShardingError(msg, hint='write it as sharding.tensor_parallel_plan, and give tp_plan="auto"')
        kwargs.pop("tp_size", None)
        model = load(cls, *args, **{name: value for name, value in kwargs.items() if name != "device_mesh"})
        model._tp_size = mesh[TENSOR].size()
        return model

    kind.from_pretrained = classmethod(from_pretrained)


def _prepare_split(module: Any) -> None:
    """Have `Accelerator.prepare` split layers before it shards, and compare the first pass after."""
    kind = module.Accelerator
    prepare, prepare_tp = kind.prepare, kind._prepare_tp

    @functools.wraps(prepare_tp)
    def split(self: Any, *args: Any) -> Any:
        if not _splits_here() or not any(_is_full(each) for each in args):
            return prepare_tp(self, *args)
        _check(self)
        first = [
            each if isinstance(each, nn.Module) else self._prepare_one(each, first_pass=True) for each in args
        ]
        result = [each if isinstance(each, nn.Module) else self._prepare_one(each) for each in first]
        exchanged = {old: new for model in result if _is_full(model) for old, new in _split_model(model, self)}
        for group in _groups(result):
            group["params"] = [exchanged.get(param, param) for param in group["params"]]
        return result

    @functools.wraps(prepare)
    def prepare_and_compare(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = prepare(self, *args, **kwargs)
        for model in (each for each in args if isinstance(each, nn.Module)):
            plan = _split.pop(model, None)
            if plan is not None:
                _expect(plan, model, self)
        return result

    kind.prepare, kind._prepare_tp = prepare_and_compare, split


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

    sizes, axis = accelerator.parallelism_config, accelerator.torch_device_mesh[TENSOR]
    configured, shards = dict(decode().sharding.tensor_parallel_plan), sizes.dp_shard_size * sizes.cp_size
    plan: SplitPlan = feature(LAYERS).split_layers(model, configured, axis, shards=shards)
    ranks = RankGroup()
    for entry in model_tensors(model):
        old = entry.tensor
        old.data = old.data.to(_kept_in(old, accelerator)).contiguous()
        ranks.send(old.data)
        plan.split_parameter(entry)
        if entry.tensor is not old:
            yield old, entry.tensor  # type: ignore[misc]
    _split[model] = plan
    messages.say(f"accelerate: layers split over {axis.size()} ranks, by {plan.origin}")


def _kept_in(tensor: "torch.Tensor", accelerator: Any) -> "torch.dtype":
    """Return the dtype that accelerate gives a parameter when it shards; it cannot do so when that is split."""
    import torch

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
