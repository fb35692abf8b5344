"""The torch format: one file with all that a checkpoint holds, a model or an optimizer. Needs torch and memory."""

import io
import pickle
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fsdplaunch.checkpoint.merge import MergeOptions, MergeResult, Progress, ProgressMeter
from fsdplaunch.checkpoint.merge.plan import plan_alone
from fsdplaunch.checkpoint.merge.weight_names import final_names
from fsdplaunch.checkpoint.merge.write import ChecksumCheck, blocks_of, gather_block
from fsdplaunch.checkpoint.output_folder import atomic_output, check_memory, check_space
from fsdplaunch.checkpoint.readers.data_files import DataFiles
from fsdplaunch.checkpoint.readers.dcp_index import CheckpointIndex, NamePath, StoredTensor, StoredValue
from fsdplaunch.checkpoint.readers.open import OpenCheckpoint
from fsdplaunch.checkpoint.untrusted_files import short
from fsdplaunch.errors import CheckpointError
from fsdplaunch.files import durable_file

FILE_NAME = "pytorch_model.bin"
_MAX_VALUE = 2**30
_MAX_LIST = 10**6


def merge_to_torch(
    opened: OpenCheckpoint, target: Path, options: MergeOptions, progress: Progress | None
) -> MergeResult:
    """Merge into `target/pytorch_model.bin`.

    Raises:
        CheckpointError: When disk or memory are too small, or a value would need code to be loaded.
    """
    index, path = opened.index, target / FILE_NAME
    nbytes = sum(tensor.nbytes for tensor in index.tensors)
    needed = nbytes + sum(value.place.length for value in index.values)
    check_space(target, needed)
    check_memory(needed)
    paths, state = _torch_paths(index), dict[Any, Any]()
    meter = ProgressMeter("copy", nbytes, progress)
    with atomic_output(target, overwrite=options.overwrite) as partial:
        with ChecksumCheck(opened.sources, wanted=options.checksums) as check:
            for tensor in index.tensors:
                meter.tensor = tensor.name
                _put(state, paths[tensor.name], _load_tensor(tensor, opened, meter, check), tensor.name)
        for value in index.values:
            _put(state, paths[value.name], _load_value(value, opened.sources), value.name)
        with durable_file(partial / FILE_NAME) as file:
            torch.save(state, file)
        if options.reads_back:
            hint = "no output was made and the checkpoint is unchanged; check the disk"
            try:
                written = torch.load(partial / FILE_NAME, map_location="cpu", weights_only=True, mmap=True)
            except (OSError, RuntimeError, pickle.UnpicklingError) as problem:
                msg = f"{FILE_NAME} could not be read back: {str(problem).splitlines()[0]}"
                raise CheckpointError(msg, hint=hint) from None
            if not _is_same(written, state):
                msg = f"{FILE_NAME} was read back and differs from the checkpoint"
                raise CheckpointError(msg, hint=hint)
        size = (partial / FILE_NAME).stat().st_size
    return MergeResult(
        output=target,
        files=(path,),
        source=opened.folder,
        tensors=len(index.tensors),
        nbytes=size,
        dtypes=dict(Counter(tensor.dtype.name for tensor in index.tensors)),
        verified=options.reads_back,
    )


def _torch_paths(index: CheckpointIndex) -> dict[str, NamePath]:
    """Return where each entry goes in the saved object: below a sole outer key, flat names without wrappers."""
    paths = {entry.name: entry.path for entry in index.entries}
    if len({path[0] for path in paths.values()}) == 1 and all(len(path) > 1 for path in paths.values()):
        paths = {name: path[1:] for name, path in paths.items()}
    if all(len(path) == 1 for path in paths.values()):
        flat = final_names(list(paths.values()))
        paths = {name: (final,) for name, final in zip(paths, flat, strict=True)}
    return paths


def _load_tensor(tensor: StoredTensor, opened: OpenCheckpoint, meter: ProgressMeter, check: ChecksumCheck) -> Any:
    dtype = getattr(torch, tensor.dtype.name, None)
    if dtype is None or not tensor.dtype.size:
        msg = f"{short(tensor.name)} is {tensor.dtype.name}, which cannot be copied element by element"
        raise CheckpointError(msg)
    if not tensor.nbytes:
        return torch.empty(tensor.shape, dtype=dtype)
    planned = plan_alone(tensor, opened.items([tensor]))
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
    place: Any = state
    for key, following in zip(path, (*path[1:], None), strict=True):
        leaf = following is None
        fresh = value if leaf else [] if type(following) is int else {}
        if type(key) is int:
            if not isinstance(place, list) or not 0 <= key < _MAX_LIST:
                msg = f"{short(name)} is item {key} of something that is not a list"
                raise CheckpointError(msg)
            place.extend([None] * (key + 1 - len(place)))
            if leaf or place[key] is None:
                place[key] = fresh
        else:
            if not isinstance(place, dict) or (leaf and key in place):
                msg = f"{short(name)} is stored twice"
                raise CheckpointError(msg)
            place.setdefault(key, fresh)
        place = place[key]


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two trees of tensors and plain values are equal, tensors by dtype and bytes: NaN is equal."""
    if isinstance(other, torch.Tensor):
        if not isinstance(one, torch.Tensor) or (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        flat = [tensor.contiguous().reshape(-1) for tensor in (one, other)]
        return not one.numel() or torch.equal(*(tensor.view(torch.uint8) for tensor in flat))
    if isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_same(one[name], other[name]) for name in other)
    if isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return bool(one == other) or one is other or (one != one and other != other)  # noqa: PLR0124  (NaN)
