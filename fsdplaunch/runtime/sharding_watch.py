"""Whether this process ever sharded a model, and who did it: this package, a library, the script.

Looked at before the first optimizer step, when all is known and nothing is lost yet, and at the script's end. The
moment of sharding is recorded, not the objects: a model may be gone by the time the script ends.
"""

import functools
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as optimizers

from fsdplaunch.config.environment import ALLOW_UNSHARDED, decode
from fsdplaunch.errors import NeverShardedError, ShardingError
from fsdplaunch.run_dir import SHARDED
from fsdplaunch.runtime.device import joined_by_script
from fsdplaunch.runtime.messages import script_line
from fsdplaunch.runtime.patch import WEIGHTS_USED, before_first_step, call_if_imported, wrap, wrap_once_imported
from fsdplaunch.runtime.rank import own_folder, world_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """A library that trains in its own way."""

    name: str  # of the class that was built, as its users say it
    remedy: str  # how to make it shard
    replicates: bool = False  # with DistributedDataParallel, unless it is configured otherwise


_LIGHTNING = (
    "give {} strategy='ddp', whose model is then sharded as configured, or its own FSDPStrategy(); and devices="
    " the workers of a node"
)
_ACCELERATOR = "give the model to accelerator.prepare, and leave distributed_type: FSDP in the file"
_TRAINER = "leave distributed_type: FSDP in the file, and let the Trainer itself place the model"
_OTHER = "let {} shard in its own way and start it without FSDP, or call fsdplaunch.prepare(model) in a plain loop"
_CLASSES = {
    "accelerate.accelerator.Accelerator": ("Accelerator", _ACCELERATOR),
    "transformers.trainer.Trainer": ("Trainer", _TRAINER),
    "lightning.pytorch.trainer.trainer.Trainer": ("Lightning's Trainer", _LIGHTNING),
    "pytorch_lightning.trainer.trainer.Trainer": ("Lightning's Trainer", _LIGHTNING),
    "lightning.fabric.fabric.Fabric": ("Lightning's Fabric", _LIGHTNING),
    "lightning_fabric.fabric.Fabric": ("Lightning's Fabric", _LIGHTNING),
    "deepspeed.runtime.engine.DeepSpeedEngine": ("DeepSpeedEngine", _OTHER),
    "colossalai.booster.booster.Booster": ("Booster", _OTHER),
    "composer.trainer.trainer.Trainer": ("Trainer", _OTHER),
}
"""What a class is called by its users, and how to make it shard."""

_built: list[Library] = []
_listeners: list[Callable[[], None]] = []


def on_sharding(listener: Callable[[], None]) -> None:
    """Call a function from now on whenever a model is sharded or an object that will shard is built."""
    _listeners.append(listener)


def _notify_listeners() -> None:
    for listener in _listeners:
        listener()


def built_library() -> Library | None:
    """Return the library whose object was built; the outermost, which was built first."""
    return _built[0] if _built else None


def watch_libraries() -> None:
    """Start to notice them, in modules that are imported and in those that will be."""

    def note_and_construct(library: Library, construct: Any, *args: Any, **kwargs: Any) -> None:
        _built.append(library)  # before: constructors move and wrap models
        _notify_listeners()
        construct(*args, **kwargs)

    for path, (name, remedy) in _CLASSES.items():
        module, _, kind = path.rpartition(".")
        library = Library(name=name, remedy=remedy.format(name), replicates=remedy == _LIGHTNING)
        wrap_once_imported(module, f"{kind}.__init__", functools.partial(note_and_construct, library))


_seen: list[str] = []
_replicated: list[str] = []
_begun: list[str] = []


def ever_sharded() -> bool:
    """Return whether a model was sharded in this process."""
    return bool(_seen)


def sharded_by() -> str | None:
    """Return what sharded or replicated a model first in this process, or None."""
    return next(iter([*_begun, *_seen, *_replicated]), None)


def begin_sharding(how: str) -> None:
    """Note that something is about to shard a model: it, and not what it calls, is who shards."""
    _begun.append(how)
    _notify_listeners()


def mark_sharded(how: str) -> None:
    """Note that a model was sharded, in memory and, once, as a file for the launcher.

    The file serves scripts that leave through `os._exit`, where nothing of ours runs any more.
    """
    if not _seen and (folder := own_folder()) is not None:
        (folder / SHARDED).touch()
    _seen.append(how)
    _notify_listeners()


def watch_sharding() -> None:
    """Start to notice torch's ways to shard, and to divide a model's layers or their tensors over ranks.

    `fully_shard` makes one subclass of FSDPModule per model class and is imported by name all over the place, so
    the making of that subclass is the one point every caller passes. FSDP1 is a class: its constructor. What
    divides layers is a function that no module of torch's has by name but its own package.
    """
    from torch.distributed import tensor
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import parallel
    from torch.nn.parallel import DistributedDataParallel

    if "__init_subclass__" in FSDPModule.__dict__:
        return

    def subclass_made(cls: Any, /, **kwargs: Any) -> None:
        super(FSDPModule, cls).__init_subclass__(**kwargs)
        if issubclass(cls, nn.Module):  # torch's own helper classes are not models
            mark_sharded("fully_shard")

    def marking(name: str, mark: Callable[[str], None] = mark_sharded) -> Callable[..., Any]:
        def call_and_mark(call: Any, *args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            mark(name)
            return result

        return call_and_mark

    FSDPModule.__init_subclass__ = classmethod(subclass_made)  # type: ignore[assignment]
    wrap(FullyShardedDataParallel, "__init__", marking("FullyShardedDataParallel"))
    wrap(DistributedDataParallel, "__init__", marking("DistributedDataParallel", _replicated.append))
    for module in (parallel, parallel.api):
        wrap(module, "parallelize_module", marking("parallelize_module"))
    wrap(tensor, "distribute_module", marking("distribute_module"))
    stage = "torch.distributed.pipelining.stage"
    wrap_once_imported(stage, "PipelineStage.__init__", marking("PipelineStage"))


def check_sharded(name: str) -> None:
    """Raise when a script ended that never sharded a model, unless it may, or never read configured weights."""
    weights = decode().checkpoint.weights
    if weights is not None and not call_if_imported(WEIGHTS_USED):
        msg = (
            f"{name} ended and checkpoint.weights ({weights}) was never read: no model was prepared by fsdplaunch"
        )
        hint = "call fsdplaunch.prepare(model) or fsdplaunch.load_weights(model), or leave checkpoint.weights out"
        raise ShardingError(msg, hint=hint)
    if not may_stay_unsharded():
        raise never_sharded(name)


def may_stay_unsharded() -> bool:
    """Return whether a model was sharded in this process, or none needs to be."""
    return ever_sharded() or os.environ.get(ALLOW_UNSHARDED) == "1"


def never_sharded(name: str, where: str = "", also: str = "") -> NeverShardedError:
    """Return the error for a script that trained replicas; `where` is empty at its end, `also` would shard."""
    workers, how = world_size(), ""
    if _replicated:
        whole = "its worker held all of it" if workers == 1 else f"{workers} workers each held a full replica"
        how = f": {whole} ({_replicated[0]})"
    elif where and workers > 1:
        how = f": {workers} workers trained independent replicas"
    seen = f"; found at {where}" if where else ", and no torch optimizer made a step"
    library = built_library()
    ways = "call fsdplaunch.prepare(model, ...) in the script" if library is None else library.remedy
    if library is None and _replicated:
        ways = f"set launch.shard to auto, so that what is given to {_replicated[0]} is sharded; or {ways}"
    elif library is None and joined_by_script():
        ways = (
            "the script joined a process group and gives no model to DistributedDataParallel, where it would be"
            " sharded: wrap it; or launch with --shard always, if the script divides nothing itself, or with"
            " --shard off, which leaves all to the script"
        )
    ways = f"{ways}; {also}" if also else ways
    msg = f"{name} ended without sharding a model{how}{seen}"
    return NeverShardedError(msg, hint=f"{ways}; or launch with --allow-unsharded, if that is meant")


def check_at_first_step(name: str) -> None:
    """Check at the first step of any optimizer, and never again, for an error that names the script."""

    def check() -> None:
        if not may_stay_unsharded():
            raise never_sharded(name, f"its first optimizer step, {script_line()}")
        _describe_others()

    steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def compare_ranks(optimizer: Any, *_: Any) -> None:
        made = steps.get(optimizer, 0)
        steps[optimizer] = made + 1
        if made % COMPARED_EVERY == 0 and ever_sharded() and os.environ.get(ALLOW_UNSHARDED) != "1":
            from fsdplaunch.runtime.sharding.checks import check_trained

            check_trained(optimizer)

    before_first_step(optimizers, check)
    optimizers.register_optimizer_step_pre_hook(compare_ranks)
    _watch_updates(name)


COMPARED_EVERY = 100
"""After how many steps of an optimizer the ranks compare again what they do not divide of what it trains."""


_MOST_PASSES, _MOST_NODES = 10, 5000
"""How many backward passes are looked at, for scripts compute gradients for other ends as well, and how far."""


def _watch_updates(name: str) -> None:
    """Look for parameters that change between the first backward passes, without an optimizer, and unsharded."""
    left = _MOST_PASSES
    sums: dict[weakref.ref[nn.Parameter], float] = {}

    def end() -> None:
        nonlocal left
        left = 0

    def call(backward: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left = 0 if left and may_stay_unsharded() else max(left - 1, 0)
        param = None
        if left:
            param = _parameter_below(tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors), None))
        if param is not None:
            now = float(param.detach().double().sum().item())
            if sums.setdefault(weakref.ref(param), now) != now:
                where = f"its second backward pass, {script_line()}"
                also = "or move it to its device by model.to(device), where it is sharded"
                raise never_sharded(name, where, also)
        return backward(tensors, *args, **kwargs)

    before_first_step(optimizers, end)
    wrap(torch.autograd, "backward", call)


def _parameter_below(loss: Any) -> nn.Parameter | None:
    waiting, seen = [getattr(loss, "grad_fn", None)], set[Any]()
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter):
            return leaf
        waiting += [below for below, _ in node.next_functions]
    return None


def _describe_others() -> None:
    from fsdplaunch.runtime.inspection import living_modules
    from fsdplaunch.runtime.inspection.describe import announce, describe_seen
    from fsdplaunch.runtime.inspection.units import is_sharded, reshard
    from fsdplaunch.runtime.sharding.registry import registered

    models = list(filter(is_sharded, living_modules()))
    inside = {id(part) for model in models for child in model.children() for part in child.modules()}
    for model in models:
        if id(model) not in inside and registered(model) is None:
            reshard(model)  # an evaluation may have left parameters gathered, which say nothing
            library = built_library()
            announce(describe_seen(model), f"by {sharded_by() if library is None else library.name}")
