"""The forms in which a state dict lies in files: sharded, whole, and version 1's flat shards."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.agreement import from_rank_0, together
from fsdplaunch.runtime.plain_files import read_plain, write_large
from fsdplaunch.runtime.safe_reader import SafePlanner, SafeReader

State = dict[str, Any]


def write_sharded(state: State, folder: Path) -> None:
    """Write every rank's part into a folder, with one index."""
    save(state, storage_writer=FileSystemWriter(folder))


def read_sharded(state: State, folder: Path, *, strict: bool) -> set[str]:
    """Read into a state dict in place, and return the names it asks for that the folder does not have.

    Raises:
        CheckpointError: Strict, and names differ either way.
    """
    with together(f"read {folder}"):
        absent = _absent(state, folder, strict=strict)
    load(state, storage_reader=SafeReader(folder), planner=SafePlanner(allow_partial_load=not strict))
    return absent


def _absent(state: State, folder: Path, *, strict: bool) -> set[str]:
    stored = set(SafeReader(folder).read_metadata().state_dict_metadata)
    asked = set(flatten_state_dict(state)[0])
    if strict:
        check_names(stored, asked, folder)
    return asked - stored


def check_names(stored: set[str], asked: set[str], where: Path) -> None:
    """Raise when a file's names are not those of the model.

    Raises:
        CheckpointError: Naming the first few.
    """
    if stored == asked:
        return
    absent, left_over = sorted(asked - stored), sorted(stored - asked)
    words = f"lacks {', '.join(absent[:4])}" if absent else f"has {', '.join(left_over[:4])} besides"
    msg = f"{where} is of another model: it {words}"
    raise CheckpointError(msg, hint="build the model as it was when the checkpoint was saved")


def write_whole(state: State, path: Path) -> None:
    """Write a state dict that rank 0 holds whole."""
    if dist.get_rank() == 0:
        write_large(state, path)


def read_whole(path: Path, shapes: dict[str, tuple[int, ...]]) -> State:
    """Read a model's whole state dict on rank 0; the others get an empty mapping.

    Names and shapes are checked here, on rank 0 and before anything is sent: torch would notice there only, while
    the other ranks wait for what is to be sent.

    Raises:
        CheckpointError: On all ranks, if the file cannot be read or is of another model.
    """
    state: State = {}
    with together(f"read {path}"):
        if dist.get_rank() == 0:
            state = read_plain(path)
            check_names(set(state), set(shapes), path)
            wrong = [name for name, shape in shapes.items() if shape_of(state[name]) != shape]
            if wrong:
                msg = (
                    f"{path} has {wrong[0]} of shape {shape_of(state[wrong[0]])}, the model of {shapes[wrong[0]]}"
                )
                raise CheckpointError(msg, hint="build the model as it was when the checkpoint was saved")
    return state


def read_whole_optimizer(path: Path, names: set[str]) -> State:
    """Read an optimizer's whole state on rank 0; the others get its parameter groups only.

    Raises:
        CheckpointError: On all ranks, if the file cannot be read or is of an optimizer of other parameters.
    """
    state: State = {}
    with together(f"read {path}"):
        if dist.get_rank() == 0:
            state = read_plain(path)
            check_names({name for group in state["param_groups"] for name in group["params"]}, names, path)
    groups = from_rank_0(state.get("param_groups"))
    return state or {"state": {}, "param_groups": groups}


def shape_of(value: Any) -> tuple[int, ...]:
    """The full shape of a tensor, plain or sharded; of any other value, that of a scalar."""
    return tuple(value.size()) if isinstance(value, torch.Tensor | ShardedTensor) else ()


def write_flat(state: State, path: Path) -> None:
    """Write this rank's parts of version 1's flat parameters."""
    write_large({name: _own_part(value) for name, value in state.items()}, path)


def read_flat(present: State, path: Path) -> None:
    """Read this rank's flat shards into the model's own storage, of which its state dict `present` holds views.

    Raises:
        CheckpointError: They are of another model or another number of ranks.
    """
    read = read_plain(path)
    parts = {name: _own_part(value) for name, value in present.items()}
    if {name: shape_of(part) for name, part in read.items()} != {
        name: shape_of(part) for name, part in parts.items()
    }:
        msg = f"the flat shards in {path} are of another model, or of another number of ranks"
        raise CheckpointError(msg, hint="LOCAL_STATE_DICT loads into the same model on as many ranks as wrote it")
    with torch.no_grad():
        for name, part in parts.items():
            part.copy_(read[name])


def _own_part(value: torch.Tensor | ShardedTensor) -> torch.Tensor:
    """This rank's part of a flat parameter, as a tensor: one that can be read back without running code."""
    if not isinstance(value, ShardedTensor):
        return value
    shards = value.local_shards()
    return shards[0].tensor if shards else torch.empty(0)
