"""Let scripts of accelerate split layers where transformers no longer does what accelerate needs for that.

Such a script gives `from_pretrained` the Accelerator's mesh and `tp_plan="auto"`, and `Accelerator.prepare` shards
what comes back over the mesh's other axes. Newer versions of transformers make a mesh of their own instead, of all
processes, and have no `ReplicateParallel`, which accelerate imports. With these the model is loaded in full here,
and `prepare` splits it as `fsdplaunch.prepare` does.
"""

import functools
import importlib
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from fsdplaunch.config.environment import decode
from fsdplaunch.errors import ShardingError
from fsdplaunch.features import TENSOR_FORWARD, TENSOR_PLAN, TENSOR_SCALING, feature
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.compat.import_hook import once_imported
from fsdplaunch.runtime.sharding.mesh import TENSOR

if TYPE_CHECKING:
    import torch

    from fsdplaunch.runtime.tensor_parallel.split_plan import SplitPlan

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
    from fsdplaunch.runtime.inspection.model_tensors import model_tensors

    sizes, axis = accelerator.parallelism_config, accelerator.torch_device_mesh[TENSOR]
    configured, shards = dict(decode().sharding.tensor_parallel_plan), sizes.dp_shard_size * sizes.cp_size
    plan: SplitPlan = feature(TENSOR_PLAN).build_plan(model, configured, axis, shards=shards)
    feature(TENSOR_FORWARD).split_forwards(plan)
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
    feature(TENSOR_SCALING).agree_on_overflows()
    plan.expect_same_inputs(model, accelerator.device, getattr(policy, "param_dtype", None))
