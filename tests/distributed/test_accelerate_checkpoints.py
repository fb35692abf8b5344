"""What accelerate's own functions write loads here, and what is written here loads there, on the same ranks."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

import fsdplaunch
from tests.distributed.pool import RankPool
from tests.distributed.tiny import adamw, build, plugin, train_sharded
from tests.needs import needs

pytest.importorskip("accelerate", reason="accelerate is a development dependency")

FORMS = [(2, "SHARDED_STATE_DICT"), (2, "FULL_STATE_DICT"), (1, "SHARDED_STATE_DICT"), (1, "FULL_STATE_DICT")]
by_name = needs("accelerate", "1.13", "asks for sharded optimizers, its own too, by numbers that no file has")
READABLE = [pytest.param(*form, marks=by_name) if form[1] == "SHARDED_STATE_DICT" else form for form in FORMS]


def make(seed: int, version: int, form: str) -> tuple[Any, Any]:
    model = build(seed)
    fields = {"fsdp_version": version, "state_dict_type": form}
    return fsdplaunch.prepare(model, adamw(model.parameters()), plugin=plugin(**fields))


def peer(version: int, form: str) -> tuple[Any, Any]:
    """Its plugin, and of its accelerator what the four functions look at."""
    from accelerate import PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import FullOptimStateDictConfig

    PartialState(cpu=True)  # its logger asks for it
    theirs = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=form)
    if version == 1 and form == "FULL_STATE_DICT":
        # On the host torch frees what it is to move there while it is in use, and writes second moments for first.
        theirs.optim_state_dict_config = FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=False)
    accelerator = SimpleNamespace(
        num_processes=dist.get_world_size() if version == 2 else 1,  # 1: no offload, which kills CPU ranks
        process_index=dist.get_rank(),
        is_main_process=dist.get_rank() == 0,
        is_fsdp2=version == 2,
        wait_for_everyone=dist.barrier,
    )
    return theirs, accelerator


def they_write(folder: str, version: int, form: str) -> list[float]:
    from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer

    model, optimizer = make(0, version, form)
    train_sharded(model, optimizer, 3)
    theirs, accelerator = peer(version, form)
    save_fsdp_model(theirs, accelerator, model, folder)
    save_fsdp_optimizer(theirs, accelerator, optimizer, model, folder)
    dist.barrier()
    return train_sharded(model, optimizer, 3, first=3)


def we_read(folder: str, version: int, form: str) -> list[float]:
    model, optimizer = make(7, version, form)
    fsdplaunch.load_checkpoint(folder, model=model, optimizer=optimizer)
    return train_sharded(model, optimizer, 3, first=3)


def we_write(folder: str, version: int, form: str) -> list[float]:
    model, optimizer = make(0, version, form)
    train_sharded(model, optimizer, 3)
    fsdplaunch.save_checkpoint(folder, model=model, optimizer=optimizer)
    return train_sharded(model, optimizer, 3, first=3)


def they_read(folder: str, version: int, form: str) -> list[float]:
    from accelerate.utils.fsdp_utils import load_fsdp_model, load_fsdp_optimizer

    model, optimizer = make(7, version, form)
    train_sharded(model, optimizer, 1)  # it needs a state to read into
    theirs, accelerator = peer(version, form)
    load_fsdp_model(theirs, accelerator, model, folder)
    load_fsdp_optimizer(theirs, accelerator, optimizer, model, folder)
    return train_sharded(model, optimizer, 3, first=3)


@pytest.mark.parametrize(("version", "form"), FORMS)
def test_accelerates_checkpoint_loads_here(two_ranks: RankPool, tmp_path: Path, version: int, form: str) -> None:
    expected = two_ranks.run(they_write, str(tmp_path), version, form)[0]
    assert two_ranks.run(we_read, str(tmp_path), version, form)[0] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("version", "form"), READABLE)
def test_our_checkpoint_loads_in_accelerate(two_ranks: RankPool, tmp_path: Path, version: int, form: str) -> None:
    expected = two_ranks.run(we_write, str(tmp_path), version, form)[0]
    assert two_ranks.run(they_read, str(tmp_path), version, form)[0] == pytest.approx(expected, abs=1e-6)
