"""Find in a program's own source what may shard: read, never run, and only the user's own files.

A script often builds its optimizer before it hands everything to the library that shards it, so what has been
called so far does not tell who will. A mention in the source decides nothing: it is a reason to wait and see.
"""

import ast
import functools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fsdplaunch.runtime.script_line import is_user_file

_SHARDERS: dict[str, tuple[str, ...]] = {
    "fsdplaunch": ("prepare", "apply_fsdp2", "fsdp2_prepare_model"),
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
    "deepspeed": ("",),
    "colossalai": ("",),
    "composer": ("Trainer",),
}
"""By top-level package, endings of the names that shard or replicate a model; "" for any name of the package."""


_RANKS = re.compile(
    rb"\b(?:(?:local_|node_|global_)?rank|world_size|get_rank|get_world_size|is_main_process|process_index)\b",
    re.IGNORECASE,
)
"""What a script says that does one thing on one rank and another on the others."""


_GROUP = re.compile(rb"\binit_process_group\b")
_LOCKS = re.compile(rb"\b(?:fcntl|flock|lockf|filelock|FileLock|portalocker)\b")
"""What a script says by which processes exclude each other from a file that all have open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mention:
    """A name that shards, and where the program imports or uses it."""

    name: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.name}, {Path(self.file).name}:{self.line}"


def find_mention(files: list[str]) -> Mention | None:
    """Return the first name in these files that belongs to something that shards; None when there is none."""
    return next((found for file in files if (found := _first_mention(file)) is not None), None)


@functools.cache
def _first_mention(file: str) -> Mention | None:
    return next(_mentions(file), None)


def speaks_of_ranks() -> bool:
    """Return whether the user's own source names ranks anywhere, or what shards: ranks may do different things."""
    files = user_files(getattr(sys.modules["__main__"], "__file__", None))
    return find_mention(files) is not None or _program_says(_RANKS)


def excludes_others() -> bool:
    """Return whether the user's own source locks files."""
    return _program_says(_LOCKS)


def makes_a_group() -> bool:
    """Return whether the user's own source joins processes to a group."""
    return _program_says(_GROUP)


def _program_says(words: re.Pattern[bytes]) -> bool:
    return any(_says(file, words) for file in user_files(getattr(sys.modules["__main__"], "__file__", None)))


@functools.cache
def _says(file: str, words: re.Pattern[bytes]) -> bool:
    try:
        return words.search(Path(file).read_bytes()) is not None
    except OSError:
        return False


def user_files(main: str | None) -> list[str]:
    """Return the source files of the program's own modules so far: the script first, nothing that is installed."""
    return list(_files_of(main, len(sys.modules)))


@functools.lru_cache(maxsize=2)  # asked at a script's collectives, and thousands of modules take milliseconds
def _files_of(main: str | None, _modules: int) -> tuple[str, ...]:
    files = [main] if main else []
    for module in list(sys.modules.values()):
        file = getattr(module, "__dict__", {}).get("__file__")  # reading an attribute would import a lazy module
        if isinstance(file, str) and file.endswith(".py") and is_user_file(file):
            files.append(file)
    return tuple(dict.fromkeys(files))


def _mentions(file: str) -> Iterator[Mention]:
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # running it says what is wrong, better than reading it can
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {(alias.asname or alias.name.partition(".")[0]): alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:  # `from torch import nn`
            modules |= {(alias.asname or alias.name): f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        for name in _named(node, modules):
            yield Mention(name=name, file=file, line=getattr(node, "lineno", 0))


def _named(node: ast.AST, modules: dict[str, str]) -> Iterator[str]:
    """Yield the sharding names that one statement imports, or one expression takes from an imported module."""
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield from (alias.name for alias in node.names if _shards(node.module, alias.name))
    elif isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if _SHARDERS.get(alias.name.partition(".")[0]) == ("",))
    elif isinstance(node, ast.Attribute):
        root: ast.expr = node
        while isinstance(root, ast.Attribute):
            root = root.value
        if isinstance(root, ast.Name) and root.id in modules and _shards(modules[root.id], node.attr):
            yield node.attr


def _shards(module: str, name: str) -> bool:
    return any(name.endswith(ending) for ending in _SHARDERS.get(module.partition(".")[0], ()))
