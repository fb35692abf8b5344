"""The torch format: one file with all that a checkpoint holds, a model or an optimizer. Needs torch and memory."""

import io
import os
import pickle
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdplaunch.checkpoint.merge.options import MergeOptions, MergeResult, ProgressMeter, Watcher
from fsdplaunch.checkpoint.merge.plan import plan_alone
from fsdplaunch.checkpoint.merge.weight_names import OPTIMIZER_KEYS, OPTIMIZER_TABLES, final_names
from fsdplaunch.checkpoint.merge.write import ChecksumCheck, blocks_of, gather_block, verify_torch_file
from fsdplaunch.checkpoint.output_folder import OPTIMIZER_FILE, WEIGHTS, atomic_output, check_memory, check_space
from fsdplaunch.checkpoint.readers.data_files import DataFiles
from fsdplaunch.checkpoint.readers.dcp_index import CheckpointIndex, NamePath, StoredTensor, StoredValue
from fsdplaunch.checkpoint.readers.open import OpenCheckpoint
from fsdplaunch.checkpoint.untrusted_files import short
from fsdplaunch.errors import CheckpointError

FILE_NAME, OPTIMIZER_NAME = "pytorch_model.bin", "optimizer.bin"
_MAX_VALUE = 2**30
_MAX_LIST = 10**6


def torch_paths(index: CheckpointIndex, *, strip_wrappers: bool) -> dict[str, NamePath]:
    """Return where each entry goes in the saved object: below a sole outer key, flat names without wrappers."""
    paths = {tensor.name: tensor.path for tensor in index.tensors} | {
        value.name: value.path for value in index.values
    }
    outer = {path[0] for path in paths.values()}
    if len(outer) == 1 and all(len(path) > 1 for path in paths.values()):
        paths = {name: path[1:] for name, path in paths.items()}
    if all(len(path) == 1 for path in paths.values()):
        flat = final_names(list(paths.values()), strip_wrappers=strip_wrappers)
        paths = {name: (final,) for name, final in zip(paths, flat, strict=True)}
    return paths


def merge_to_torch(opened: OpenCheckpoint, target: Path, options: MergeOptions, watcher: Watcher) -> MergeResult:
    """Merge into `target/pytorch_model.bin`.

    Raises:
        CheckpointError: When disk or memory are too small, or a value would need code to be loaded.
    """
    paths = torch_paths(opened.index, strip_wrappers=options.strip_wrappers)
    return _merge(opened, target / FILE_NAME, paths, options, watcher, WEIGHTS)


def merge_optimizer(opened: OpenCheckpoint, target: Path, options: MergeOptions, watcher: Watcher) -> MergeResult:
    """Merge into `target/optimizer.bin`.

    Raises:
        CheckpointError: When there is no single optimizer, or disk or memory are too small.
    """
    paths = optimizer_paths(opened.index, where=str(opened.folder))
    result = _merge(opened, target / OPTIMIZER_NAME, paths, options, watcher, OPTIMIZER_FILE, _by_name)
    return replace(result, skipped=tuple(entry.name for entry in opened.index.entries if entry.name not in paths))


def _merge(
    opened: OpenCheckpoint,
    path: Path,
    paths: Mapping[str, NamePath],
    options: MergeOptions,
    watcher: Watcher,
    replaced: re.Pattern[str],
    arrange: Callable[[dict[Any, Any]], dict[Any, Any]] = lambda tree: tree,
) -> MergeResult:
    """Load the entries of `paths`, each at its path, and save what `arrange` makes of them as `path`.

    Old files whose names `replaced` matches go.
    """
    tensors = [tensor for tensor in opened.index.tensors if tensor.name in paths]
    needed = total_bytes(opened.index)
    check_space(path.parent, needed)
    check_memory(needed)
    watcher.start(opened, path.parent, len(tensors), needed, needed)
    meter = ProgressMeter("copy", sum(tensor.nbytes for tensor in tensors), watcher.progress)
    with atomic_output(path.parent, overwrite=options.overwrite, replaced=replaced) as partial:
        state = arrange(_load_tree(opened, tensors, paths, meter, checksums=options.checksums))
        _save(state, partial / path.name)
        if options.reads_back:
            verify_torch_file(partial / path.name, state)
        size = (partial / path.name).stat().st_size
    return MergeResult(
        output=path.parent,
        files=(path,),
        source=opened.folder,
        tensors=len(tensors),
        nbytes=size,
        seconds=0.0,
        dtypes=dict(Counter(tensor.dtype.name for tensor in tensors)),
        verified=options.reads_back,
    )


def _save(state: Mapping[Any, Any], path: Path) -> None:
    """Write a new file of torch's, on disk when this returns."""
    import torch

    with path.open("xb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def _load_tree(
    opened: OpenCheckpoint,
    tensors: Sequence[StoredTensor],
    paths: Mapping[str, NamePath],
    meter: ProgressMeter,
    *,
    checksums: bool,
) -> dict[Any, Any]:
    """Load these tensors, and the values that `paths` names, each at its path.

    Raises:
        CheckpointError: When a value would need code from the checkpoint to be loaded.
    """
    state: dict[Any, Any] = {}
    with ChecksumCheck(opened.sources, wanted=checksums) as check:
        for tensor in tensors:
            meter.tensor = tensor.name
            _put(state, paths[tensor.name], _load_tensor(tensor, opened, meter, check), tensor.name)
    for value in opened.index.values:
        if value.name in paths:
            _put(state, paths[value.name], _load_value(value, opened.sources), value.name)
    return state


def _load_tensor(tensor: StoredTensor, opened: OpenCheckpoint, meter: ProgressMeter, check: ChecksumCheck) -> Any:
    import torch

    dtype = getattr(torch, tensor.dtype.name, None)
    if dtype is None or not tensor.dtype.size:
        msg = f"{short(tensor.name)} is {tensor.dtype.name}, which cannot be copied by element"
        raise CheckpointError(msg)
    if not tensor.nbytes:
        return torch.empty(tensor.shape, dtype=dtype)
    items = opened.items([tensor])
    planned = plan_alone(tensor, items)
    data, position = bytearray(tensor.nbytes), 0
    for block in blocks_of(tensor.shape, tensor.dtype.size):
        part = gather_block(planned, block, opened.sources.read_piece)
        data[position : position + len(part)] = part
        position += len(part)
        meter.tick(len(part))
    for piece in planned.pieces:
        check.add(tensor.name, piece)
    return torch.frombuffer(data, dtype=dtype).reshape(tensor.shape)


def _load_value(value: StoredValue, sources: DataFiles) -> Any:
    """Load an entry that is not a tensor, allowing plain data only."""
    import torch

    where = f"{sources.folder / value.place.file}: {short(value.name)}"
    if value.place.length > _MAX_VALUE:
        msg = f"{where} has {value.place.length} bytes, more than a value is expected to need"
        raise CheckpointError(msg)
    data = sources.read(value.place, 0, value.place.length)
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError, TypeError) as problem:
        reason = next(iter(str(problem).splitlines()), "")
        msg = f"{where} cannot be loaded without running code from the checkpoint: {short(reason)}"
        raise CheckpointError(msg, hint="merge to safetensors, which leaves it out") from None


def _put(state: dict[Any, Any], path: NamePath, value: Any, name: str) -> None:
    """Set `value` at `path`, making dictionaries and lists on the way."""
    place: Any = state
    for key, following in zip(path, (*path[1:], None), strict=True):
        leaf = following is None
        fresh = value if leaf else [] if type(following) is int else {}
        if type(key) is int:
            if not isinstance(place, list) or not 0 <= key < _MAX_LIST:
                msg = f"{short(name)} stands at place {key} of something that is not a list"
                raise CheckpointError(msg)
            place.extend([None] * (key + 1 - len(place)))
            if leaf or place[key] is None:
                place[key] = fresh
        else:
            if not isinstance(place, dict) or (leaf and key in place):
                msg = f"{short(name)} stands where another entry is"
                raise CheckpointError(msg)
            place.setdefault(key, fresh)
        place = place[key]


def total_bytes(index: CheckpointIndex) -> int:
    """Return the bytes of all tensors and values, about the size of the file."""
    sizes: Sequence[int] = [tensor.nbytes for tensor in index.tensors]
    return sum(sizes) + sum(value.place.length for value in index.values)


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


def _by_name(tree: dict[Any, Any]) -> dict[Any, Any]:
    """Return `{"state": {NAME: ...}, "param_groups": [...]}` with the names of the unwrapped model."""
    state, groups = tree.get("state", {}), tree.get("param_groups", [])
    groups = _joined(groups) if isinstance(groups, dict) else groups
    names = list(dict.fromkeys([*state, *(name for group in groups for name in group.get("params", []))]))
    clean = dict(zip(names, final_names([(name,) for name in names]), strict=True))
    return {
        "state": {clean[name]: values for name, values in state.items()},
        "param_groups": [
            {**group, "params": [clean[name] for name in group.get("params", [])]} for group in groups
        ],
    }


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
