"""A model's and an optimizer's state, from and to files, in each of the three forms accelerate writes.

Names are those of the user's model, and dtypes are the master dtypes: what loads them need not know how they
were sharded. All functions are collective: every rank calls them.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.optim import Optimizer

from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.collectives.rank_group import from_rank_0
from fsdplaunch.runtime.inspection.parameter_names import clean_name, named_parameters, tied_names
from fsdplaunch.runtime.saving.dcp_files import (
    State,
    own_shard,
    read_flat,
    read_full,
    read_full_optimizer,
    read_sharded,
    shape_of,
)
from fsdplaunch.runtime.saving.full_state_writer import storable, write_full
from fsdplaunch.runtime.saving.sharded.write_sharded import write_sharded
from fsdplaunch.runtime.saving.small_files import write_large
from fsdplaunch.runtime.sharding.registry import registered
from fsdplaunch.runtime.state_dict.local_state import local_state
from fsdplaunch.runtime.state_dict.named_states import model_state, optimizer_state, renamed, renamed_optimizer
from fsdplaunch.runtime.state_dict.optim_state_dict import unshare_counts
from fsdplaunch.runtime.state_dict.partial_optimizer import left_out_frozen
from fsdplaunch.runtime.torch_internals.fsdp.fsdp1 import shows_original_parameters
from fsdplaunch.runtime.torch_warnings import quiet_torch

MODEL = "pytorch_model_fsdp"
OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateToSave:
    """One model or optimizer as it is to be written.

    Attributes:
        kind: FULL_STATE_DICT, SHARDED_STATE_DICT or LOCAL_STATE_DICT.
        name: Its folder or file, without a suffix.
        state: This rank's shards; sharded tensors know their place in the full ones.
        safe_name: The safetensors file that a full model gets as well.
        aliases: Further names of shared tensors, each with the one under which safetensors keeps it.
    """

    kind: str
    name: str
    state: State
    safe_name: str | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)

    def write(self, folder: Path, group: dist.ProcessGroup | None = None) -> None:
        """Write it; every rank calls this.

        Args:
            folder: The checkpoint's.
            group: All ranks over gloo, in a group of its own when another thread uses theirs meanwhile.
        """
        with quiet_torch():
            if self.kind == "SHARDED_STATE_DICT":
                write_sharded(self.state, folder / self.name, group)
            elif self.kind == "LOCAL_STATE_DICT":
                write_large(self.state, folder / f"{self.name}.bin")
            else:
                safe = None if self.safe_name is None else folder / self.safe_name
                write_full(self.state, folder / f"{self.name}.bin", safe, aliases=self.aliases, group=group)


def model_to_save(model: nn.Module, kind: str, index: int) -> StateToSave:
    """Return what is to be written of one model; every rank calls this.

    Args:
        model: Sharded.
        kind: FULL_STATE_DICT, SHARDED_STATE_DICT or LOCAL_STATE_DICT.
        index: The model's number; accelerate's names carry it.

    Raises:
        CheckpointError: LOCAL_STATE_DICT with parameters torch cannot load back.
    """
    with quiet_torch():
        if kind == "LOCAL_STATE_DICT":
            with _local(model):
                state = {name: own_shard(value) for name, value in model.state_dict().items()}
            return StateToSave(kind=kind, name=_local_name(index), state=state)
        state = model_state(model)
    if kind == "SHARDED_STATE_DICT":
        return StateToSave(kind=kind, name=f"{MODEL}_{index}", state={"model": state})
    safe = _stem("model", index) + ".safetensors" if storable(state) else None
    return StateToSave(
        kind=kind, name=_stem(MODEL, index), state=state, safe_name=safe, aliases=_aliases(model, state)
    )


def _aliases(model: nn.Module, state: State) -> dict[str, str]:
    """Return the further names of each shared tensor, with its first."""
    prepared = registered(model)
    groups = tied_names(model) if prepared is None else prepared.tied
    kept = [[name for name in names if name in state] for names in groups]
    return {name: names[0] for names in kept for name in names[1:]}


def load_model(model: nn.Module, folder: Path, index: int, kind: str | None = None) -> None:
    """Read one model back, in whichever form the folder holds it.

    Args:
        model: Sharded.
        folder: The checkpoint's.
        index: The model's number.
        kind: The form to take where the folder holds several; None for the first that is there.

    Raises:
        CheckpointError: Names or shapes do not fit the model, or the files are damaged.
    """
    with quiet_torch():
        if kind in (None, "LOCAL_STATE_DICT") and (folder / f"{_local_name(index)}.bin").exists():
            with _local(model):
                read_flat(model.state_dict(), folder / f"{_local_name(index)}.bin")
            return
        state: State = get_model_state_dict(model)
        own_names = {clean_name(name): name for name in state}
        state = renamed(state, clean_name)
        file = folder / f"{_stem(MODEL, index)}.bin"
        if (folder / f"{MODEL}_{index}").is_dir() and not (kind == "FULL_STATE_DICT" and file.exists()):
            read_sharded({"model": state}, folder / f"{MODEL}_{index}", strict=True)
            set_model_state_dict(model, renamed(state, own_names.__getitem__))
        elif file.exists():
            shapes = {name: shape_of(value) for name, value in state.items()}
            full = renamed(read_full(file, shapes), own_names.__getitem__)
            set_model_state_dict(model, full, options=_from_rank_0())
        else:
            msg = f"{folder} holds no model {index} for rank {dist.get_rank()}"
            raise CheckpointError(msg, hint="LOCAL_STATE_DICT loads on as many ranks as wrote it")


def optimizer_to_save(model: nn.Module, optimizer: Optimizer, kind: str, index: int) -> StateToSave:
    """Return what is to be written of one optimizer of a model; every rank calls this."""
    with quiet_torch(), left_out_frozen(model, optimizer):
        state = optimizer_state(model, optimizer)
    if kind == "FULL_STATE_DICT":
        return StateToSave(kind=kind, name=_stem(OPTIMIZER, index), state=state)
    return StateToSave(kind="SHARDED_STATE_DICT", name=f"{OPTIMIZER}_{index}", state={"optimizer": state})


def load_optimizer(
    model: nn.Module, optimizer: Optimizer, folder: Path, index: int, kind: str | None = None
) -> None:
    """Read one optimizer of a model back, in whichever form the folder holds it; `kind` as in `load_model`.

    Raises:
        CheckpointError: The folder holds none, or it does not fit.
    """
    sharded, full = folder / f"{OPTIMIZER}_{index}", folder / f"{_stem(OPTIMIZER, index)}.bin"
    if not sharded.is_dir() and not full.exists():
        msg = f"{folder} holds no optimizer {index}"
        raise CheckpointError(msg, hint="leave the optimizer out, or load a checkpoint that has one")
    with quiet_torch(), left_out_frozen(model, optimizer):
        state: State = get_optimizer_state_dict(model, optimizer)
        own_names = {clean_name(name): name for group in state["param_groups"] for name in group["params"]}
        if sharded.is_dir() and not (kind == "FULL_STATE_DICT" and full.exists()):
            state = renamed_optimizer(state, clean_name)
            absent = read_sharded({"optimizer": state}, sharded, strict=False)
            stateless = {name for name in own_names if any(key.startswith(_state_of(name)) for key in absent)}
            options = None
        else:
            # A file that accelerate wrote under FSDP1 has one step count for all parameters of a unit.
            state = unshare_counts(read_full_optimizer(full, set(own_names)))
            stateless = _stateless(state, own_names)
            options = _from_rank_0(strict=False)  # names are checked; state may be missing
            if dist.get_rank() == 0:
                state["state"] |= {name: {} for name in stateless}  # 2.7 to 2.9 ask for all
        restored = renamed_optimizer(state, own_names.__getitem__)
        set_optimizer_state_dict(model, optimizer, restored, options=options)
    for name, param in named_parameters(model):
        if name in stateless:  # it had never had a gradient when the checkpoint was saved
            optimizer.state.pop(param, None)


def _state_of(name: str) -> str:
    """Return what the flattened names of a parameter's state in a sharded checkpoint begin with."""
    return f"optimizer.state.{name}."


def _stateless(full: State, names: Iterable[str]) -> set[str]:
    """Return the parameters a full optimizer state has nothing for; rank 0 holds it and tells."""
    stateless: set[str] = from_rank_0(set(names) - set(full.get("state", {})))
    return stateless


def _stem(name: str, index: int) -> str:
    return name if index == 0 else f"{name}_{index}"


def _local_name(index: int) -> str:
    return f"{_stem(MODEL, index)}_rank{dist.get_rank()}"


def _from_rank_0(*, strict: bool = True) -> StateDictOptions:
    return StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=strict)


@contextmanager
def _local(model: nn.Module) -> Iterator[None]:
    """Have the model's state dict hold FSDP1's flat shards as they are."""
    if not isinstance(model, FullyShardedDataParallel) or shows_original_parameters(model):
        msg = "LOCAL_STATE_DICT cannot be loaded back into this model"
        hint = "set fsdp_state_dict_type to SHARDED_STATE_DICT, or fsdp_use_orig_params to false under FSDP1"
        raise CheckpointError(msg, hint=hint)
    # Torch looks for ranks of one replica's group only.
    if dist.get_world_size(model.process_group) < dist.get_world_size():
        msg = "LOCAL_STATE_DICT cannot hold a model with replicas (HYBRID_SHARD)"
        raise CheckpointError(msg, hint="set fsdp_state_dict_type to SHARDED_STATE_DICT")
    with local_state(model), FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        yield
