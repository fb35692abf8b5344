"""Make this package's plugin class a child of accelerate's, so that accelerate takes it for its own.

`Accelerator(fsdp_plugin=...)` asks for an instance of accelerate's class. A worker imports accelerate only if its
script does; from then on the class has one more parent, and objects that were made before are its instances, too.
"""

from functools import partial
from typing import Any

from fsdplaunch.runtime.compat.import_hook import once_imported


class JoinsAccelerate:
    """Stands between a class and `object`: Python lets such a class have other parents later."""


def join_accelerate(plugin: type[JoinsAccelerate]) -> None:
    """Make a class a child of accelerate's plugin class, now or as soon as accelerate is imported."""
    once_imported("accelerate.utils.dataclasses", partial(_adopt, plugin))


def _adopt(plugin: type[JoinsAccelerate], dataclasses: Any) -> None:
    theirs = dataclasses.FullyShardedDataParallelPlugin
    if not issubclass(plugin, theirs):
        plugin.__bases__ = (*plugin.__bases__, theirs)
