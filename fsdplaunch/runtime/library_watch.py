"""Notice the objects of libraries that shard or replicate models by themselves, when they are built.

Building one is what counts: such a library is often imported by another one that does not use it.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fsdplaunch.runtime.compat.import_hook import once_imported


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """A library that trains in its own way.

    Attributes:
        name: Of the class that was built, as its users say it.
        remedy: How it is told to shard.
        replicates: Whether it keeps replicas, with DistributedDataParallel, unless it is told otherwise.
    """

    name: str
    remedy: str
    replicates: bool = False


_ACCELERATE = "give the model to accelerator.prepare, and leave distributed_type: FSDP in the file"
_TRAINER = "leave distributed_type: FSDP in the file, and let the Trainer itself place the model"
_OTHER = "let {} shard in its own way and start it without FSDP, or call fsdplaunch.prepare(model) in a plain loop"


def _of_lightning(name: str) -> Library:
    """Return what one of Lightning's two entries means: by itself it keeps replicas."""
    remedy = (
        f"give {name} strategy='ddp', whose model is then sharded as configured, or its own FSDPStrategy(); and"
        " devices= the workers of a node"
    )
    return Library(name=name, remedy=remedy, replicates=True)


_CLASSES = (
    ("accelerate.accelerator", "Accelerator", Library(name="Accelerator", remedy=_ACCELERATE)),
    ("transformers.trainer", "Trainer", Library(name="Trainer", remedy=_TRAINER)),
    *(
        (module, "Trainer", _of_lightning("Lightning's Trainer"))
        for module in ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")
    ),
    *(
        (module, "Fabric", _of_lightning("Lightning's Fabric"))
        for module in ("lightning.fabric.fabric", "lightning_fabric.fabric")
    ),
    *(
        (module, cls, Library(name=cls, remedy=_OTHER.format(cls)))
        for module, cls in (
            ("deepspeed.runtime.engine", "DeepSpeedEngine"),
            ("colossalai.booster.booster", "Booster"),
            ("composer.trainer.trainer", "Trainer"),
        )
    ),
)
"""Module, class, and what its being built means."""

_built: list[Library] = []
_listeners: list[Callable[[], None]] = []


def on_sharding(listener: Callable[[], None]) -> None:
    """Call a function from now on whenever a model is sharded or an object that will shard is built."""
    _listeners.append(listener)


def tell_listeners() -> None:
    """Call the functions."""
    for listener in _listeners:
        listener()


def built_library() -> Library | None:
    """Return the library whose object was built; the outermost, which was built first."""
    return _built[0] if _built else None


def watch_libraries() -> None:
    """Start to notice them, in modules that are imported and in those that will be."""
    for module, name, library in _CLASSES:
        once_imported(module, functools.partial(_before_construction, name=name, library=library))


def _before_construction(module: Any, *, name: str, library: Library) -> None:
    cls = getattr(module, name)
    construct = cls.__init__

    @functools.wraps(construct)
    def note_and_construct(self: Any, *args: Any, **kwargs: Any) -> None:
        _built.append(library)  # before: constructors move and wrap models
        tell_listeners()
        construct(self, *args, **kwargs)

    cls.__init__ = note_and_construct
