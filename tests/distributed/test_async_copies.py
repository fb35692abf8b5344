"""What checkpoint.async copies beside the training is of the moment of the call, whatever happens next."""

import contextlib
import io
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdplaunch
from tests.distributed.pool import RankPool
from tests.distributed.test_saving import ASYNC
from tests.distributed.tiny import plugin, words_of

UNMET_SECONDS, LATE = 10.0, 0.1
"""How long the copying thread waits for the step that is to wait for it: it comes sooner on any machine."""
FORMS: dict[str, dict[str, Any]] = {
    "2": {"fsdp_version": 2},
    "2 kept": {"fsdp_version": 2, "reshard_after_forward": False},
    "2 full": {"fsdp_version": 2, "state_dict_type": "FULL_STATE_DICT"},
    "1 flat": {"fsdp_version": 1, "use_orig_params": False},
    "1 local": {"fsdp_version": 1, "use_orig_params": False, "state_dict_type": "LOCAL_STATE_DICT"},
}


@contextlib.contextmanager
def late_copies(seconds: float = UNMET_SECONDS) -> Iterator[None]:
    """Have the thread that copies begin once somebody waits for it, as under a large model.

    Args:
        seconds: When it begins if nobody does.
    """
    from fsdplaunch.runtime.saving import background_save

    copy, wait = background_save._copy_on_host, background_save.HostCopies.wait
    main, waited_for = list[int](), threading.Event()

    def copy_late(tensors: Any) -> None:
        if len(main) == 1:  # the first call is in the training's thread
            waited_for.wait(seconds)
            time.sleep(2 * background_save.NOTABLE_SECONDS)
        main.append(1)
        copy(tensors)

    def say_and_wait(copies: Any) -> None:
        waited_for.set()
        wait(copies)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(background_save, "_copy_on_host", copy_late)
        patch.setattr(background_save.HostCopies, "wait", say_and_wait)
        patch.setattr(background_save, "AT_ONCE", 0)
        yield


def trained(fields: dict[str, Any], seed: int) -> tuple[nn.Module, Any]:
    """A model with a buffer that every forward changes, and an optimizer that has made a step."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3, bias=False))
    fields = {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 1} | fields
    chosen = plugin(**fields)
    model, optimizer = fsdplaunch.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1), plugin=chosen)
    go_on(model, optimizer)
    return model, optimizer


def go_on(model: nn.Module, optimizer: Any) -> None:
    model(torch.randn(4, 7)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def contents(folder: Path) -> dict[str, Any]:
    """Return the bytes of every file of a checkpoint that holds tensors; of flat shards those of each tensor."""
    files: dict[str, Any] = {path.name: path.read_bytes() for path in folder.rglob("*.safetensors")}
    files |= {f"{path.parent.name}/{path.name}": path.read_bytes() for path in folder.rglob("*.distcp")}
    for path in folder.rglob("*_rank*.bin"):
        files[path.name] = {key: value.detach().numpy().tobytes() for key, value in torch.load(path).items()}
    return files


def save_twice(folder: str, fields: dict[str, Any]) -> tuple[list[bool], str]:
    """For two seeds: whether a save beside the next step has the bytes of a blocking one; what was said."""
    from fsdplaunch.runtime.saving.background_save import background, finish_saves

    said, equal = io.StringIO(), []
    background._told = False
    for seed in range(2):
        model, optimizer = trained(fields, seed)
        now, later = (Path(folder) / f"{seed}-{name}" for name in ("now", "later"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FSDPLAUNCH_CHECKPOINT_ASYNC", "false")
            fsdplaunch.save_checkpoint(now, model=model, optimizer=optimizer)
        with late_copies(), contextlib.redirect_stderr(said):
            fsdplaunch.save_checkpoint(later, model=model, optimizer=optimizer)
            go_on(model, optimizer)
            go_on(model, optimizer)
            finish_saves()
        dist.barrier()
        equal.append(len(contents(now)) > 0 and contents(now) == contents(later))
    return equal, said.getvalue()


@pytest.mark.parametrize("form", FORMS)
def test_step_right_after_the_call_does_not_reach_the_file(two_ranks: RankPool, tmp_path: Path, form: str) -> None:
    answers = two_ranks.run(save_twice, str(tmp_path), FORMS[form], env=ASYNC)
    assert [equal for equal, _ in answers] == [[True] * 2] * 2
    waits = answers[0][1].count("the optimizer's step waited 0.")
    assert waits == (0 if form == "1 flat" else 1)  # FSDP1's state dicts are copies already; said once


def change_meanwhile(folder: str) -> tuple[str, str, bool]:
    """Change a parameter by hand, load it, and average a second model while copies are made."""
    from fsdplaunch.runtime.saving.background_save import finish_saves

    model, optimizer = trained(FORMS["2"], 0)
    with late_copies(LATE):
        fsdplaunch.save_checkpoint(folder, model=model, optimizer=optimizer, step=1)
        if dist.get_rank() == 1:
            with torch.no_grad():
                next(model.parameters()).mul_(3)
        by_hand = words_of(finish_saves)
    with late_copies():
        fsdplaunch.save_checkpoint(folder, model=model, optimizer=optimizer, step=2)
        model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})
        loaded = words_of(finish_saves)
    averaged, _ = trained(FORMS["2"], 1)  # no optimizer that is saved trains it
    before = averaged[0].weight.full_tensor().clone()
    with late_copies(LATE):
        fsdplaunch.save_checkpoint(folder, model=[model, averaged], optimizer=optimizer, step=3)
        with torch.no_grad():
            averaged[0].weight.mul_(5)
        finish_saves()
    fsdplaunch.load_checkpoint(folder, model=[model, averaged])
    dist.barrier()
    return by_hand, loaded, torch.equal(averaged[0].weight.full_tensor(), before)


def test_other_changes_end_the_save_wait_or_do_not_matter(two_ranks: RankPool, tmp_path: Path) -> None:
    for by_hand, loaded, kept in two_ranks.run(change_meanwhile, str(tmp_path), env=ASYNC):
        assert "checkpoint-1: rank 1: 0.weight was changed by something other than an optimizer's step" in by_hand
        assert loaded == "nothing was raised"
        assert kept
    assert not (tmp_path / "checkpoint-1").exists()
