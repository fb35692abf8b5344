"""A model's and an optimizer's state, from and to files, in each of the forms accelerate writes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.optim import Optimizer

from fsdplaunch.checkpoint.manifest import INDEX_NAME
from fsdplaunch.checkpoint.readers.xla_files import XLA_FILE
from fsdplaunch.checkpoint.untrusted_files import COPY_AGAIN
from fsdplaunch.display_text import listed
from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.collectives.rank_group import from_all, from_rank_0, raise_on_all_ranks
from fsdplaunch.runtime.inspection import clean_name, named_parameters, tied_names
from fsdplaunch.runtime.messages import quiet_torch
from fsdplaunch.runtime.saving.full_state_file import storable, write_full
from fsdplaunch.runtime.saving.plain_files import read_plain, write_large
from fsdplaunch.runtime.saving.safe_dcp_reader import SafePlanner, SafeReader
from fsdplaunch.runtime.saving.write_sharded import write_sharded
from fsdplaunch.runtime.sharding.registry import registered
from fsdplaunch.runtime.state_dict.gather import files_of_ranks
from fsdplaunch.runtime.state_dict.named_states import (
    left_out_frozen,
    model_state,
    optimizer_state,
    renamed,
    renamed_optimizer,
    unshare_counts,
)
from fsdplaunch.runtime.state_dict.state_dict_type import state_dict_type
from fsdplaunch.runtime.torch_internals.distributed import ShardedTensor
from fsdplaunch.runtime.torch_internals.late_imports import flatten_state_dict

State = dict[str, Any]
MODEL = "pytorch_model_fsdp"
OPTIMIZER = "optimizer"
_STATES = "optimizer.state."  # what the flattened names of parameters' states in a sharded checkpoint begin with
_SHOWN = 4


def read_sharded(state: State, folder: Path, *, strict: bool) -> set[str]:
    """Read into a state dict in place; return what names the folder lacks, which is an error if strict."""
    with raise_on_all_ranks(f"read {folder}"):
        if not (folder / INDEX_NAME).exists() and any(XLA_FILE.fullmatch(path.name) for path in folder.glob("*")):
            whose = "the files of single ranks that PyTorch/XLA sharded"
            msg = f"{folder} holds {whose}, which torch's FSDP cannot read"
            hint = f"fsdplaunch merge-weights {folder} OUT, then prepare(model, weights='OUT')"
            raise CheckpointError(msg, hint=hint)
        reader = SafeReader(folder)
        stored = set(reader.read_metadata().state_dict_metadata)
        needed = set(flatten_state_dict(state)[0])
        if strict:
            outer = f"{next(iter(state))}."  # the checkpoint's own word, no part of the model's names
            own, wanted = ({name.removeprefix(outer) for name in names} for names in (stored, needed))
            _check_names(own, wanted, folder)
        elif "state" in state.get("optimizer", {}):  # of a parameter it may be missing, not left over
            trained, here = (
                {key.removeprefix(_STATES).rpartition(".")[0] for key in keys if key.startswith(_STATES)}
                for keys in (stored, needed)
            )
            _check_names(trained - here, set(), folder)
        # Every rank plans its reads alone; torch would gather the plans on one rank and send each back as it was.
        load(state, storage_reader=reader, planner=SafePlanner(allow_partial_load=not strict), no_dist=True)
    return needed - stored


def _check_names(stored: set[str], needed: set[str], where: Path) -> None:
    if stored == needed:
        return
    absent, left_over = sorted(needed - stored), sorted(stored - needed)
    words = [f"lacks {listed(absent, _SHOWN)}"] if absent else []
    words += [f"has {listed(left_over, _SHOWN)} besides"] if left_over else []
    msg = f"{where} is from another model: it {' and '.join(words)}"
    raise CheckpointError(msg, hint="build and wrap the model as it was when the checkpoint was saved")


def _read_full(path: Path, shapes: dict[str, tuple[int, ...]]) -> State:
    """Read a model's full state dict on rank 0; the others get an empty mapping.

    Names and shapes are checked here, on rank 0 and before anything is sent: torch would notice there only, while
    the other ranks wait for what is to be sent.
    """
    state: State = {}
    with raise_on_all_ranks(f"read {path}"):
        if dist.get_rank() == 0:
            state = read_plain(path)
            _check_names(set(state), set(shapes), path)
            for name, shape in shapes.items():
                if (stored := _shape_of(state[name])) != shape:
                    msg = f"{path} has {name} of shape {stored}, the model has it of shape {shape}"
                    raise CheckpointError(msg, hint="build the model as it was when the checkpoint was saved")
    return state


def _read_full_optimizer(path: Path, names: set[str]) -> State:
    """Read an optimizer's full state on rank 0; the others get its parameter groups only."""
    state: State = {}
    with raise_on_all_ranks(f"read {path}"):
        if dist.get_rank() == 0:
            state = read_plain(path)
            if not isinstance(state, dict) or not isinstance(state.get("state"), dict):
                msg = f"{path} does not hold an optimizer's state"
                raise CheckpointError(msg, hint="give the checkpoint that the run saved")
            _check_names({name for group in state["param_groups"] for name in group["params"]}, names, path)
    groups = from_rank_0(state.get("param_groups"))
    return state or {"state": {}, "param_groups": groups}


def _shape_of(value: Any) -> tuple[int, ...]:
    return tuple(value.size()) if isinstance(value, torch.Tensor | ShardedTensor) else ()


def _read_flat(present: State, path: Path) -> None:
    """Read this rank's flat shards into the model's own storage, of which its state dict `present` holds views."""
    shards = {name: _own_shard(value) for name, value in present.items()}
    with raise_on_all_ranks(f"load {path.parent}"), torch.no_grad():
        read = read_plain(path)
        if {name: _shape_of(each) for name, each in read.items()} != {
            name: _shape_of(each) for name, each in shards.items()
        }:
            msg = f"the flat shards in {path} are from another model, or from another number of ranks"
            hint = "LOCAL_STATE_DICT loads into the same model on as many ranks as wrote it"
            raise CheckpointError(msg, hint=hint)
        for name, shard in shards.items():
            shard.copy_(read[name])


def _own_shard(value: torch.Tensor | ShardedTensor) -> torch.Tensor:
    """Return this rank's shard of a flat parameter as a tensor, which can be read back without running code."""
    if not isinstance(value, ShardedTensor):
        return value
    shards = value.local_shards()
    return shards[0].tensor if shards else torch.empty(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateToSave:
    """One model or optimizer as it is to be written."""

    kind: str  # FULL_STATE_DICT, SHARDED_STATE_DICT or LOCAL_STATE_DICT
    name: str  # its folder or file, without a suffix
    state: State  # this rank's shards; sharded tensors know their place in the full ones
    safe_name: str | None = None  # the safetensors file that a full model gets as well
    # further names of shared tensors, each with the one under which safetensors keeps it
    aliases: Mapping[str, str] = field(default_factory=dict)

    def write(self, folder: Path, group: dist.ProcessGroup | None = None) -> dict[str, int]:
        """Write it; every rank calls this, over gloo. Returns the checksums of data files that rank 0 knows."""
        with quiet_torch():
            if self.kind == "SHARDED_STATE_DICT":
                return write_sharded(self.state, folder / self.name, group)
            if self.kind == "LOCAL_STATE_DICT":
                write_large(self.state, folder / f"{self.name}.bin")
            else:
                safe = None if self.safe_name is None else folder / self.safe_name
                write_full(self.state, folder / f"{self.name}.bin", safe, aliases=self.aliases, group=group)
            return {}


def model_to_save(model: nn.Module, kind: str, index: int) -> StateToSave:
    """Return what is to be written of one sharded model, with its number; every rank calls this."""
    with quiet_torch():
        if kind == "LOCAL_STATE_DICT":
            with state_dict_type(model, kind):
                state = {name: _own_shard(value) for name, value in model.state_dict().items()}
            return StateToSave(kind=kind, name=_local_name(index), state=state)
        state = model_state(model)
    if kind == "SHARDED_STATE_DICT":
        return StateToSave(kind=kind, name=f"{MODEL}_{index}", state={"model": state})
    prepared = registered(model)
    tied = tied_names(model) if prepared is None else prepared.tied
    kept = [[name for name in names if name in state] for names in tied]
    return StateToSave(
        kind=kind,
        name=_stem(MODEL, index),
        state=state,
        safe_name=_stem("model", index) + ".safetensors" if storable(state) else None,
        aliases={name: names[0] for names in kept for name in names[1:]},
    )


def _stored_in(folder: Path, places: Sequence[Path], what: str, hint: str) -> Path:
    """Return the first of the places, one for each form, in which something is stored; in one form on all ranks.

    A rank that could not look there while the others begin to read would leave them in a collective.
    """
    number = None
    with raise_on_all_ranks(f"load {folder}"):
        number = next((number for number, path in enumerate(places) if path.exists()), None)
        if number is None:
            msg = f"{folder} holds no {what}"
            raise CheckpointError(msg, hint=hint)
    if len(set(from_all(number))) > 1:
        msg = f"cannot load {folder}: its {what} has a different format on different ranks"
        raise CheckpointError(msg, hint=COPY_AGAIN)
    return places[number or 0]


def load_model(model: nn.Module, folder: Path, index: int) -> None:
    """Read one model back, in whichever form the folder holds it."""
    local, sharded = folder / f"{_local_name(index)}.bin", folder / f"{MODEL}_{index}"
    file = folder / f"{_stem(MODEL, index)}.bin"
    hint = "LOCAL_STATE_DICT loads on as many ranks as wrote it"
    stored = _stored_in(folder, (local, sharded, file), f"model {index} for rank {dist.get_rank()}", hint)
    with quiet_torch():
        if stored == local:
            with state_dict_type(model, "local_state_dict"):
                _read_flat(model.state_dict(), local)
            return
        state: State = get_model_state_dict(model)
        own_names = {clean_name(name): name for name in state}
        state = renamed(state, clean_name)
        if stored == sharded:
            read_sharded({"model": state}, sharded, strict=True)
            set_model_state_dict(model, renamed(state, own_names.__getitem__))
        else:
            shapes = {name: _shape_of(value) for name, value in state.items()}
            full = renamed(_read_full(file, shapes), own_names.__getitem__)
            set_model_state_dict(model, full, options=_from_rank_0())


def optimizer_to_save(model: nn.Module, optimizer: Optimizer, kind: str, index: int) -> StateToSave:
    """Return what is to be written of one optimizer of a model; every rank calls this."""
    with quiet_torch(), left_out_frozen(model, optimizer), files_of_ranks():
        state = optimizer_state(model, optimizer)
    if kind == "FULL_STATE_DICT":
        return StateToSave(kind=kind, name=_stem(OPTIMIZER, index), state=state)
    return StateToSave(kind="SHARDED_STATE_DICT", name=f"{OPTIMIZER}_{index}", state={"optimizer": state})


def load_optimizer(model: nn.Module, optimizer: Optimizer, folder: Path, index: int) -> None:
    """Read one optimizer of a model back, in whichever form the folder holds it."""
    sharded, full = folder / f"{OPTIMIZER}_{index}", folder / f"{_stem(OPTIMIZER, index)}.bin"
    hint = "leave the optimizer out, or load a checkpoint that has one"
    stored = _stored_in(folder, (sharded, full), f"optimizer {index}", hint)
    with quiet_torch(), left_out_frozen(model, optimizer), files_of_ranks():
        state: State = get_optimizer_state_dict(model, optimizer)
        own_names = {clean_name(name): name for group in state["param_groups"] for name in group["params"]}
        if stored == sharded:
            state = renamed_optimizer(state, clean_name)
            absent = read_sharded({"optimizer": state}, sharded, strict=False)
            stateless = {name for name in own_names if any(key.startswith(f"{_STATES}{name}.") for key in absent)}
            options = None
        else:
            # A file that accelerate wrote under FSDP1 has one step count for all parameters of a unit.
            state = unshare_counts(_read_full_optimizer(full, set(own_names)))
            # Rank 0 holds the state, and sends the names of those that have none.
            stateless = from_rank_0(set(own_names) - set(state.get("state", {})))
            options = _from_rank_0(strict=False)  # names are checked; state may be missing
            if dist.get_rank() == 0:
                state["state"] |= {name: {} for name in stateless}  # 2.9 asks for all
        restored = renamed_optimizer(state, own_names.__getitem__)
        set_optimizer_state_dict(model, optimizer, restored, options=options)
    for name, param in named_parameters(model):
        if name in stateless:  # it had never had a gradient when the checkpoint was saved
            optimizer.state.pop(param, None)


def _stem(name: str, index: int) -> str:
    return name if index == 0 else f"{name}_{index}"


def _local_name(index: int) -> str:
    return f"{_stem(MODEL, index)}_rank{dist.get_rank()}"


def _from_rank_0(*, strict: bool = True) -> StateDictOptions:
    return StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=strict)
