"""Merge an optimizer's checkpoint into one torch file, with every parameter's state under its name.

Needs torch and the memory. Values that are not tensors are read as plain data only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdplaunch.checkpoint.merge.options import MergeOptions, MergeResult, ProgressMeter
from fsdplaunch.checkpoint.merge.torch_output import load_tree, merge_to_one_file, save_tree
from fsdplaunch.checkpoint.merge.watcher import Watcher
from fsdplaunch.checkpoint.merge.weight_names import OPTIMIZER_KEYS, OPTIMIZER_TABLES, final_names
from fsdplaunch.checkpoint.output_checks import OPTIMIZER_FILE
from fsdplaunch.checkpoint.readers.dcp_index import CheckpointIndex, NamePath
from fsdplaunch.checkpoint.readers.open import OpenCheckpoint
from fsdplaunch.errors import CheckpointError, UsageError

OPTIMIZER_NAME = "optimizer.bin"


def merge_optimizer(
    opened: OpenCheckpoint, target: Path, options: MergeOptions, watcher: Watcher, _: UsageError | None
) -> MergeResult:
    """Merge into `target/optimizer.bin`.

    Raises:
        CheckpointError: When there is no single optimizer, or disk or memory are too small.
    """
    paths = optimizer_paths(opened.index, where=str(opened.folder))

    def write(folder: Path, meter: ProgressMeter) -> None:
        write_optimizer(opened, paths, folder, meter, checksums=options.checksums)

    tensors = [tensor for tensor in opened.index.tensors if tensor.name in paths]
    result = merge_to_one_file(opened, target / OPTIMIZER_NAME, tensors, options, watcher, OPTIMIZER_FILE, write)
    return replace(result, skipped=tuple(entry.name for entry in opened.index.entries if entry.name not in paths))


def optimizer_paths(index: CheckpointIndex, *, where: str) -> dict[str, NamePath]:
    """Return the entries of the optimizer in `index`, each with its path below the optimizer's own keys.

    Raises:
        CheckpointError: When there is no optimizer, or several.
    """
    paths = {entry.name: entry.path for entry in index.entries}
    while True:
        outer = {str(path[0]) for path in paths.values()}
        tables = {key.partition(".")[0] for key in outer}
        if tables and tables <= OPTIMIZER_TABLES:
            return {name: _split(path) for name, path in paths.items()}
        own = sorted(outer & OPTIMIZER_KEYS) or sorted(outer)
        if len(own) != 1 or not any(len(path) > 1 for path in paths.values()):
            found = f": it holds {', '.join(own[:5])}" if own else ""
            msg = f"{where} holds no single optimizer's state{found}"
            raise CheckpointError(msg, hint="give the folder of the optimizer's checkpoint (optimizer_0)")
        paths = {name: path[1:] for name, path in paths.items() if len(path) > 1 and path[0] == own[0]}


def _split(path: NamePath) -> NamePath:
    """Return a flattened key, `state.NAME.exp_avg`, as the path it stands for."""
    if len(path) > 1:
        return path
    table, _, rest = str(path[0]).partition(".")
    name, _, key = rest.rpartition(".")
    return (table, name, key)


def write_optimizer(
    opened: OpenCheckpoint,
    paths: Mapping[str, NamePath],
    folder: Path,
    meter: ProgressMeter,
    *,
    checksums: bool = True,
) -> None:
    """Load the entries of `paths` and save `{"state": {NAME: ...}, "param_groups": [...]}` in `folder`."""
    tree = load_tree(opened, paths, meter, checksums=checksums)
    state, groups = tree.get("state", {}), tree.get("param_groups", [])
    groups = _joined(groups) if isinstance(groups, dict) else groups
    names = list(dict.fromkeys([*state, *(name for group in groups for name in group.get("params", []))]))
    clean = dict(zip(names, final_names([(name,) for name in names]), strict=True))
    merged = {
        "state": {clean[name]: values for name, values in state.items()},
        "param_groups": [
            {**group, "params": [clean[name] for name in group.get("params", [])]} for group in groups
        ],
    }
    save_tree(merged, folder / OPTIMIZER_NAME)


def _joined(options: Mapping[str, Mapping[str, Any]]) -> Sequence[dict[str, Any]]:
    """Return flattened options, noted per parameter, as groups of parameters that share them."""
    groups: list[dict[str, Any]] = []
    for name, values in options.items():
        plain = {key: value for key, value in values.items() if key != "params"}
        group = next((group for group in groups if _same(group, plain)), None)
        if group is None:
            groups.append({**plain, "params": [name]})
        else:
            group["params"].append(name)
    return groups


def _same(group: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Compare options; a tensor among them (a learning rate, for instance) by its only value."""
    return group.keys() - {"params"} == options.keys() and all(
        bool(group[key] == value) for key, value in options.items()
    )
