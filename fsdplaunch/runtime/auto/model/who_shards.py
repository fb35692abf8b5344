"""Decide who shards the script's models: the script, a library it uses, or this package. Once.

What decides is what has happened: something was sharded, an object was built that will shard, a model was given to
DistributedDataParallel. `launch.shard: always` overrules it. Two facts are reasons to wait:

- The user's own modules hold a name that shards (`Accelerator`, `fully_shard`, a Trainer): it may be used later,
  or be an unused import. What nobody has sharded when training begins is sharded here.
- The script has joined a process group. It is written for several ranks, and may divide data, gradients or layers
  by itself. Only what it gives to DistributedDataParallel is sharded; nothing given is an error at the first step.
"""

import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

from fsdplaunch.config.schema.config import Config
from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.device import joined_by_script
from fsdplaunch.runtime.messages import is_user_file, script_line
from fsdplaunch.runtime.sharding_watch import built_library, on_sharding, sharded_by

_SHARDERS: dict[str, tuple[str, ...]] = {
    "accelerate": ("Accelerator",),
    "transformers": ("Trainer",),
    "trl": ("Trainer",),
    "torch": (
        *("fully_shard", "FullyShardedDataParallel", "DistributedDataParallel"),
        *("parallelize_module", "distribute_module", "PipelineStage"),
    ),
    "lightning": ("Trainer", "Fabric"),
    "pytorch_lightning": ("Trainer",),
    "lightning_fabric": ("Fabric",),
    "composer": ("Trainer",),
    "fsdplaunch": ("prepare", "apply_fsdp2", "fsdp2_prepare_model"),
}
"""By top-level package, endings of the names of classes and functions that shard or replicate a model."""
_MODULES = frozenset(
    {
        *("fsdplaunch", "accelerate", "trl", "deepspeed", "colossalai", "composer"),
        *("lightning", "lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"),
        *("torch.nn.parallel", "torch.distributed.fsdp", "torch.distributed.pipelining"),
        *("torch.distributed.tensor", "torch.distributed.tensor.parallel"),
    }
)
"""Modules by which a script reaches such a name without holding it: `import accelerate as a`."""


class Ownership:
    """The decision, made the first time a hook needs it and it can be made."""

    def __init__(self, config: Config) -> None:
        self.version = config.fsdp_config.fsdp_version or 2
        self.setting = config.launch.shard
        self.ours: bool | None = None  # once it is made
        # The script is for DistributedDataParallel: it divides data, seeds random numbers and saves by rank.
        self.ranked = False
        self.put_off: Callable[[], None] = lambda: None  # called when there is a reason to wait with the decision
        self.on_decision: Callable[[], None] = lambda: None  # called when it is made
        self.leave_draws: Callable[[], None] = lambda: None  # called where the script is to draw by rank
        self.adopted = ""  # where the first model was sharded for the script
        self._keeps_batch = config.launch.keep_global_batch
        self._owner = ""
        on_sharding(self._see)

    @property
    def only_replicas(self) -> bool:
        """Whether only models given to DistributedDataParallel are sharded: others are the script's own."""
        return self.setting != "always" and (self.ranked or joined_by_script())

    def decided(self) -> bool:
        """Return whether this package shards and divides the data, after deciding it if that can be done."""
        self._decide(now=False)
        return bool(self.ours) and self.version != 1 and not self.ranked

    def claim(self, what: str, *, now: bool = False) -> bool:
        """Return whether this package is to shard what the script has here, where it `builds AdamW`.

        `now` says that training begins, so that nobody else will shard any more.
        """
        self._decide(now=now)
        return self._checked(what)

    def claim_replicas(self, what: str) -> bool:
        """Return whether this package shards what the script or a library gives to DistributedDataParallel."""
        library = built_library()
        if self.setting == "always" or (sharded_by() is None and (library is None or library.replicates)):
            self._set(ours=True)
        else:
            self._decide(now=True)
        if self.ours and not self.ranked:
            self.ranked = True
            self.leave_draws()
        return self._checked(what)

    def _checked(self, what: str) -> bool:
        self._check_batches(what)
        if self.ours and self.version == 1:
            msg = f"{script_line()} {what}, nothing in the script shards it, and doing so needs fsdp_version 2"
            raise ShardingError(msg, hint="launch with --fsdp-version 2, or call fsdplaunch.prepare in the script")
        return bool(self.ours)

    def _see(self) -> None:
        """Decide where something else shards, or was built to; a library may still replicate."""
        library = built_library()
        replicates = library is not None and library.replicates
        if self.ours is None and not replicates:
            self._decide(now=True)
            self._check_batches("shards")
        elif self.ours and self.setting != "always" and library is not None and not replicates:
            if not self.adopted:
                self._owner = library.name
                self._set(ours=False)
                return
            msg = f"{script_line()} builds {library.name} after a model was sharded for the script, {self.adopted}"
            hint = (
                f"launch with --shard explicit, which leaves all to {library.name}; or with --shard always, if it"
                " gets no model"
            )
            raise ShardingError(msg, hint=hint)

    def _decide(self, *, now: bool) -> None:
        if self.ours is not None:
            return
        library, owner = built_library(), ""
        if self.setting != "always":
            owner = (sharded_by() or "") if library is None else library.name
            if not owner and (joined_by_script() or (not now and holds_a_sharder())):
                self.put_off()
                return
        self._owner = owner
        self._set(ours=not owner)

    def _set(self, *, ours: bool) -> None:
        if self.ours is not ours:
            self.ours = ours
            self.on_decision()
            if not ours:
                self.leave_draws()

    def _check_batches(self, what: str) -> None:
        by_accelerate = self._owner.endswith(("Accelerator", "Trainer")) and "lightning" not in sys.modules
        if self.ours is False and self._keeps_batch and not by_accelerate:
            msg = f"{script_line()} {what}: keep_global_batch is set, and the script divides its batches itself"
            raise ShardingError(msg, hint="leave it out, and set each worker's batch size in the script")


def holds_a_sharder() -> bool:
    """Return whether one of the user's own modules holds a name that shards or replicates, used or not."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__dict__", {}).get("__file__")  # reading an attribute would import a lazy module
        is_users = name == "__main__" or (isinstance(file, str) and is_user_file(file))
        if is_users and any(map(_shards, list(vars(module).values()))):
            return True
    return False


def _shards(value: Any) -> bool:
    if isinstance(value, ModuleType):
        return value.__dict__.get("__name__") in _MODULES
    if isinstance(value, type):
        return any(_is_sharder(base) for base in value.__mro__)
    return isinstance(value, FunctionType) and _is_sharder(value)


def _is_sharder(value: Any) -> bool:
    """Return whether a class or function is one of those by its own name: a script may rename it."""
    endings = _SHARDERS.get(str(value.__module__).partition(".")[0], ())
    return bool(endings) and value.__name__.endswith(endings)
