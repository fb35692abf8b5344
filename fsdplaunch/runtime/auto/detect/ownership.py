"""Decide who shards the script's models: the script, a library it uses, or this package. Once, and printed.

What decides is what has happened: something was sharded, or an object was built that will shard. A mention of such
a thing in the source, which may be an unused import, only puts the decision off to where training begins.
"""

import sys
from collections.abc import Callable

from fsdplaunch.config.schema.config import Config
from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.auto.detect.import_scan import Mention, find_mention, user_files
from fsdplaunch.runtime.library_watch import built_library
from fsdplaunch.runtime.script_line import script_line
from fsdplaunch.runtime.sharding_events import on_sharding
from fsdplaunch.runtime.sharding_watch import sharded_by


class Ownership:
    """The decision, made the first time a hook needs it and it can be made.

    Attributes:
        ours: True or False once it is made, None before.
        ranked: Whether the script is written for several ranks, with DistributedDataParallel: it divides its data,
            seeds its random numbers and saves by rank itself.
        put_off: Called when something in the source is a reason to wait with the decision.
        on_decision: Called when it is made.
    """

    def __init__(self, config: Config) -> None:
        self.version = config.fsdp_config.fsdp_version or 2
        self.setting = config.launch.shard
        self.ours: bool | None = None
        self.ranked = False
        self.put_off: Callable[[], None] = _nothing
        self.on_decision: Callable[[], None] = _nothing
        self._announcement = self._if_sharded = ""
        self._keeps_batch = config.launch.keep_global_batch
        self._owner = ""
        on_sharding(self._see)

    def _see(self) -> None:
        """Decide and say so where something else shards, or was built to; a library may still replicate."""
        if self.ours is None and not _replicates():
            self._decide(now=True)
            self._announce()
            self._check_batches("shards")
        if self._if_sharded and sharded_by() is not None:
            self._announcement, self._if_sharded = self._if_sharded, ""
            self._announce()

    def decided(self) -> bool:
        """Return whether this package shards and divides the data, after deciding it if that can be done."""
        self._decide(now=False)
        return bool(self.ours) and self.version != 1 and not self.ranked

    @property
    def only_replicas(self) -> bool:
        """Return whether only models given to DistributedDataParallel are sharded: others are the script's own."""
        return self.ranked and self.setting != "always"

    def claim(self, what: str, *, now: bool = False) -> bool:
        """Return whether this package is to shard what the script has here, and print it the first time.

        Args:
            what: What the script does here, for the error: `builds AdamW`.
            now: Whether training begins, so that nobody else will shard any more.

        Raises:
            ShardingError: It is to act, and FSDP1 is configured.
        """
        self._decide(now=now)
        self._announce()
        self._check_batches(what)
        if self.ours and self.version == 1:
            msg = f"{script_line()} {what}, nothing in the script shards it, and doing so needs fsdp_version 2"
            raise ShardingError(msg, hint="set fsdp_version to 2, or call fsdplaunch.prepare in the script")
        return bool(self.ours)

    def claim_replicas(self, what: str) -> bool:
        """Return whether this package shards what the script or a library gives to DistributedDataParallel."""
        library = built_library()
        if not self.ours and library is not None and library.replicates and sharded_by() is None:
            self.ours = True
            self.on_decision()
            self._announcement = f"launch.shard auto: {library.name} replicates, so its model is sharded"
            self._if_sharded = ""
        return self.claim(what, now=True)

    def _decide(self, *, now: bool) -> None:
        if self.ours is not None:
            return
        owner = None if self.setting == "always" else _acting()
        if owner is None and self.setting != "always" and not now and mention() is not None:
            self.put_off()
            return
        self.ours, self._owner = owner is None, owner or ""
        self.on_decision()
        if owner is not None:
            by = f"launch.shard auto: the script shards by itself ({owner}, {script_line()})"
            if _replicates() and sharded_by() is None:
                self._if_sharded = by
            else:
                self._announcement = by
        elif self.setting == "always":
            self._announcement = "launch.shard always: the script's models are sharded for it"
        else:
            self._announcement = (
                "launch.shard auto: nothing in the script shards, so its models are sharded for it"
            )

    def _check_batches(self, what: str) -> None:
        """Refuse to keep the global batch where another one shards and makes its own loaders."""
        if self.ours is False and self._keeps_batch and not _divides_batches(self._owner):
            msg = f"{script_line()} {what}: keep_global_batch is set, and the script divides its batches itself"
            raise ShardingError(msg, hint="leave it out, and set each worker's batch size in the script")

    def _announce(self) -> None:
        if self._announcement:
            messages.say(self._announcement)
            self._announcement = ""


def _nothing() -> None:
    """Do nothing."""


def mention() -> Mention | None:
    """Return what the user's own source says that may shard, used or not."""
    return find_mention(user_files(getattr(sys.modules["__main__"], "__file__", None)))


def _replicates() -> bool:
    """Return whether a library was built that gives its model to DistributedDataParallel by itself."""
    library = built_library()
    return library is not None and library.replicates


def _acting() -> str | None:
    """Return what shards already, or was built to."""
    library = built_library()
    return sharded_by() if library is None else library.name


def _divides_batches(owner: str) -> bool:
    """Return whether accelerate makes the loaders of what shards, which then divide batches as configured."""
    return owner.split(",", maxsplit=1)[0].endswith(("Accelerator", "Trainer")) and "lightning" not in sys.modules
