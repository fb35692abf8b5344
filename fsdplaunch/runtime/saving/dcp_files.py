"""The forms in which a state dict lies in files: sharded, full, and FSDP1's flat shards."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load

from fsdplaunch.checkpoint.index_file import INDEX_NAME
from fsdplaunch.checkpoint.readers.xla_files import XLA_FILE
from fsdplaunch.errors import CheckpointError
from fsdplaunch.name_lists import listed
from fsdplaunch.runtime.collectives.rank_group import from_rank_0, raise_on_all_ranks
from fsdplaunch.runtime.saving.plain_files import read_plain
from fsdplaunch.runtime.saving.safe_dcp_reader import SafePlanner, SafeReader
from fsdplaunch.runtime.torch_internals.dcp import flatten_state_dict
from fsdplaunch.runtime.torch_internals.sharded_tensor import ShardedTensor

State = dict[str, Any]
_OPTIMIZER, _STATES = "optimizer", "state"
_SHOWN = 4


def read_sharded(state: State, folder: Path, *, strict: bool) -> set[str]:
    """Read into a state dict in place, and return the names it asks for that the folder does not have.

    Raises:
        CheckpointError: Strict, and names differ either way.
    """
    _refuse_files_of_xla(folder)
    reader = SafeReader(folder)
    with raise_on_all_ranks(f"read {folder}"):
        absent = _absent(state, folder, reader, strict=strict)
        # Every rank plans its reads alone; torch would gather the plans on one rank and send each back as it was.
        load(state, storage_reader=reader, planner=SafePlanner(allow_partial_load=not strict), no_dist=True)
    return absent


def _refuse_files_of_xla(folder: Path) -> None:
    if not (folder / INDEX_NAME).exists() and any(XLA_FILE.fullmatch(path.name) for path in folder.glob("*")):
        msg = (
            f"{folder} holds the files of single ranks that PyTorch/XLA sharded, and torch's FSDP is to read them"
        )
        hint = f"fsdplaunch merge-weights {folder} OUT, then prepare(model, weights='OUT')"
        raise CheckpointError(msg, hint=hint)


def _absent(state: State, folder: Path, reader: SafeReader, *, strict: bool) -> set[str]:
    stored = set(reader.read_metadata().state_dict_metadata)
    needed = set(flatten_state_dict(state)[0])
    if strict:
        outer = f"{next(iter(state))}."  # the checkpoint's own word, no part of the model's names
        own, wanted = ({name.removeprefix(outer) for name in names} for names in (stored, needed))
        check_names(own, wanted, folder)
    elif _STATES in state.get(_OPTIMIZER, {}):
        check_names(_owners(stored) - _owners(needed), set(), folder)  # state may be missing, not left over
    return needed - stored


def _owners(keys: Iterable[str]) -> set[str]:
    """Return the parameters whose optimizer state some flattened keys are of."""
    start = f"{_OPTIMIZER}.{_STATES}."
    return {key.removeprefix(start).rpartition(".")[0] for key in keys if key.startswith(start)}


def check_names(stored: set[str], needed: set[str], where: Path) -> None:
    """Raise when a file's names are not those of the model.

    Raises:
        CheckpointError: With the number of names that differ either way and the first few of them.
    """
    if stored == needed:
        return
    absent, left_over = sorted(needed - stored), sorted(stored - needed)
    words = [f"lacks {listed(absent, _SHOWN)}"] if absent else []
    words += [f"has {listed(left_over, _SHOWN)} besides"] if left_over else []
    msg = f"{where} is of another model: it {' and '.join(words)}"
    hint = _prefix_hint(absent, left_over) or "build the model as it was when the checkpoint was saved"
    raise CheckpointError(msg, hint=hint)


def _prefix_hint(absent: list[str], left_over: list[str]) -> str | None:
    """Return a hint when all names differ by the same beginning: the model was wrapped, or is a child."""
    if not absent or len(absent) != len(left_over):
        return None
    for longer, shorter, where in ((left_over, absent, "the checkpoint's"), (absent, left_over, "the model's")):
        begin = longer[0].removesuffix(shorter[0])
        if begin != longer[0] and longer == sorted(begin + name for name in shorter):
            return (
                f"{where} names begin with {begin!r}, the others do not: give the same module as when it was saved"
            )
    return None


def read_full(path: Path, shapes: dict[str, tuple[int, ...]]) -> State:
    """Read a model's full state dict on rank 0; the others get an empty mapping.

    Names and shapes are checked here, on rank 0 and before anything is sent: torch would notice there only, while
    the other ranks wait for what is to be sent.

    Raises:
        CheckpointError: On all ranks, if the file cannot be read or is of another model.
    """
    state: State = {}
    with raise_on_all_ranks(f"read {path}"):
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


def read_full_optimizer(path: Path, names: set[str]) -> State:
    """Read an optimizer's full state on rank 0; the others get its parameter groups only.

    Raises:
        CheckpointError: On all ranks, if the file cannot be read or is of an optimizer of other parameters.
    """
    state: State = {}
    with raise_on_all_ranks(f"read {path}"):
        if dist.get_rank() == 0:
            state = read_plain(path)
            check_names({name for group in state["param_groups"] for name in group["params"]}, names, path)
    groups = from_rank_0(state.get("param_groups"))
    return state or {"state": {}, "param_groups": groups}


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the full shape of a tensor, plain or sharded; of any other value, that of a scalar."""
    return tuple(value.size()) if isinstance(value, torch.Tensor | ShardedTensor) else ()


def read_flat(present: State, path: Path) -> None:
    """Read this rank's flat shards into the model's own storage, of which its state dict `present` holds views.

    Raises:
        CheckpointError: They are of another model or another number of ranks.
    """
    read = read_plain(path)
    shards = {name: own_shard(value) for name, value in present.items()}
    if {name: shape_of(shard) for name, shard in read.items()} != {
        name: shape_of(shard) for name, shard in shards.items()
    }:
        msg = f"the flat shards in {path} are of another model, or of another number of ranks"
        raise CheckpointError(msg, hint="LOCAL_STATE_DICT loads into the same model on as many ranks as wrote it")
    with torch.no_grad():
        for name, shard in shards.items():
            shard.copy_(read[name])


def own_shard(value: torch.Tensor | ShardedTensor) -> torch.Tensor:
    """Return this rank's shard of a flat parameter as a tensor, which can be read back without running code."""
    if not isinstance(value, ShardedTensor):
        return value
    shards = value.local_shards()
    return shards[0].tensor if shards else torch.empty(0)
