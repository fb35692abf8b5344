"""Runs that are saved and loaded go on as if they had not stopped."""

import contextlib
import io
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdplaunch
from fsdplaunch.checkpoint.readers.dcp_index import read_index
from tests.distributed.pool import RankError, RankPool
from tests.distributed.tiny import (
    adamw,
    batch,
    build,
    loss_of,
    my_part,
    plugin,
    train_sharded,
    words_of,
)

HALF = 3
FORMS: dict[str, dict[str, Any]] = {
    "1 sharded": {"fsdp_version": 1, "state_dict_type": "SHARDED_STATE_DICT"},
    "1 full": {"fsdp_version": 1, "state_dict_type": "FULL_STATE_DICT"},
    "1 flat sharded": {"fsdp_version": 1, "state_dict_type": "SHARDED_STATE_DICT", "use_orig_params": False},
    "1 local": {"fsdp_version": 1, "state_dict_type": "LOCAL_STATE_DICT", "use_orig_params": False},
    "2 sharded": {"fsdp_version": 2},
    "2 full": {"fsdp_version": 2, "state_dict_type": "FULL_STATE_DICT"},
    "2 sharded, checkpointed blocks": {"fsdp_version": 2, "activation_checkpointing": True},
    "1 full, checkpointed blocks": {"fsdp_version": 1, "activation_checkpointing": True},
}
OPTIONS = {form: {"tied": form in ("1 full", "1 local", "2 sharded")} for form in FORMS}
"""Of the model that is saved in each."""


def fresh(fields: dict[str, Any], seed: int = 0, **options: Any) -> tuple[nn.Module, Any, Any]:
    model = build(seed, **options)
    model, optimizer = fsdplaunch.prepare(model, adamw(model.parameters()), plugin=plugin(**fields))
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=HALF - 1, gamma=0.5)


def train(model: nn.Module, optimizer: Any, scheduler: Any, first: int) -> list[float]:
    losses = []
    for step in range(first, first + HALF):
        losses += train_sharded(model, optimizer, 1, first=step)
        scheduler.step()
    return losses


def save_half_way(folder: str, fields: dict[str, Any], options: dict[str, Any]) -> tuple[list[float], float]:
    """Save after half a run; the second half's losses, and the next random number at the time of saving."""
    model, optimizer, scheduler = fresh(fields, **options)
    train(model, optimizer, scheduler, 0)
    extra = {"tokens": 123, "note": "half"}
    fsdplaunch.save_checkpoint(
        folder, model=model, optimizer=optimizer, scheduler=scheduler, step=HALF, extra=extra
    )
    drawn = torch.rand(()).item()
    return train(model, optimizer, scheduler, HALF), drawn


def go_on(folder: str, fields: dict[str, Any], options: dict[str, Any]) -> tuple[list[float], float, Any]:
    """Load into a model of other weights and run the second half."""
    model, optimizer, scheduler = fresh(fields, seed=99, **options)
    state = fsdplaunch.load_checkpoint(folder, model=model, optimizer=optimizer, scheduler=scheduler)
    drawn = torch.rand(()).item()
    return train(model, optimizer, scheduler, HALF), drawn, (state["step"], dict(state["extra"]))


def largest_difference(one: list[float], other: list[float]) -> float:
    assert len(one) == len(other)
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def saved(two_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Any]]:
    """Return a function that gives a half-way checkpoint, written once for each form, and how its run went on."""

    @cache
    def save(form: str) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp("saved")
        kept_on = two_ranks.run(save_half_way, str(folder), FORMS[form], OPTIONS[form])[0]
        return folder / f"checkpoint-{HALF}", kept_on

    return save


@pytest.mark.parametrize("form", FORMS)
def test_loaded_run_goes_on_as_the_saved_one(two_ranks: RankPool, saved: Any, form: str) -> None:
    folder, (kept_on, drawn) = saved(form)
    resumed, drawn_again, told = two_ranks.run(go_on, str(folder), FORMS[form], OPTIONS[form])[0]
    assert largest_difference(kept_on, resumed) < 1e-6
    assert drawn == drawn_again
    assert told == (HALF, {"tokens": 123, "note": "half"})


LAYOUTS = {
    "1 full": {"pytorch_model_fsdp.bin", "model.safetensors", "optimizer.bin"},
    "1 local": {"pytorch_model_fsdp_rank0.bin", "pytorch_model_fsdp_rank1.bin", "optimizer_0"},
    "2 sharded": {"pytorch_model_fsdp_0", "optimizer_0"},
    "2 full": {"pytorch_model_fsdp.bin", "model.safetensors", "optimizer.bin"},
}


@pytest.mark.parametrize("form", LAYOUTS)
def test_files_have_the_names_accelerate_gives_them(saved: Any, form: str) -> None:
    names = {path.name for path in saved(form)[0].iterdir()}
    rest = {"scheduler.bin", "random_states_0.pkl", "random_states_1.pkl", "extra.bin", "fsdplaunch.json"}
    assert names == LAYOUTS[form] | rest


@pytest.mark.parametrize("form", ["2 sharded, checkpointed blocks", "1 sharded"])
def test_tensors_have_the_names_of_the_users_model(saved: Any, form: str) -> None:
    stored = read_index(saved(form)[0] / "pytorch_model_fsdp_0").tensors
    expected = {f"model.{name}": tuple(tensor.shape) for name, tensor in build().state_dict().items()}
    assert {tensor.name: tensor.shape for tensor in stored} == expected


def test_full_checkpoint_is_the_plain_models_state_dict(saved: Any) -> None:
    from safetensors import safe_open

    folder, _ = saved("1 full, checkpointed blocks")
    build(3).load_state_dict(torch.load(folder / "pytorch_model_fsdp.bin", weights_only=True))
    with safe_open(saved("1 full")[0] / "model.safetensors", "pt") as file:
        assert "head.weight" not in file.keys()  # noqa: SIM118  (a shared weight once, as transformers has it)
        assert file.metadata()["head.weight"] == "embed.weight"


def test_manifest_names_every_file_and_how_the_model_was_sharded(saved: Any) -> None:
    folder, _ = saved("2 sharded")
    manifest = json.loads((folder / "fsdplaunch.json").read_text())
    there = {str(p.relative_to(folder)): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
    del there["fsdplaunch.json"]
    assert manifest["files"] == there
    assert (manifest["complete"], manifest["world_size"], manifest["step"]) == (True, 2, HALF)
    model = manifest["models"][0]
    assert (model["class"], model["mesh"], model["dtypes"]) == ("TinyLM", {"dp_shard": 2}, ["float32"])
    assert model["tied"] == [["embed.weight", "head.weight"]]


# Whole or not at all


def save(folder: str, seed: int, step: int | None) -> str:
    model, optimizer, _ = fresh({"fsdp_version": 2}, seed=seed)
    return str(fsdplaunch.save_checkpoint(folder, model=model, optimizer=optimizer, step=step))


def loaded_weight(folder: str) -> tuple[float, Any, str]:
    model, _, _ = fresh({"fsdp_version": 2}, seed=99)
    state = fsdplaunch.load_checkpoint(folder, model=model)
    return model.head.weight.full_tensor()[0, 0].item(), state["step"], str(state["path"])


def weight(seed: int) -> float:
    return build(seed).head.weight[0, 0].item()


def save_and_die(folder: str, seed: int, step: int | None) -> None:
    from fsdplaunch.runtime.saving import save_job

    def die(*_: Any) -> Any:
        if dist.get_rank() == 1:
            os._exit(9)
        return io.BytesIO()

    save_job.durable_file = die
    save(folder, seed, step)


@pytest.mark.parametrize("step", [7, None])
def test_killed_save_leaves_the_earlier_checkpoint(two_ranks: RankPool, tmp_path: Path, step: int | None) -> None:
    folder = str(tmp_path / "out")
    two_ranks.run(save, folder, 1, step)
    with pytest.raises(RankError, match="died"):
        two_ranks.run(save_and_die, folder, 2, step)
    assert [p.name for p in tmp_path.rglob(".*partial")], "the save must have begun"
    assert two_ranks.run(loaded_weight, folder)[0][:2] == (weight(1), step)
    two_ranks.run(save, folder, 3, step)
    assert two_ranks.run(loaded_weight, folder)[0][:2] == (weight(3), step)
    assert not list(tmp_path.rglob(".*partial"))


def test_saving_again_keeps_files_of_others(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(save, str(tmp_path), 1, None)
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "vocab.txt").write_text("a b c")
    two_ranks.run(save, str(tmp_path), 2, None)
    assert (tmp_path / "tokenizer" / "vocab.txt").read_text() == "a b c"
    assert two_ranks.run(loaded_weight, str(tmp_path))[0][0] == weight(2)


def refusals(folder: str) -> list[str]:
    """What is said of folders that cannot be replaced, of none, of values and sizes that cannot be saved."""
    model, _, _ = fresh({"fsdp_version": 2})
    save, new = fsdplaunch.save_checkpoint, f"{folder}/new"
    with contextlib.chdir(folder):
        said = [words_of(save, each, model=model) for each in (".", folder, "a-file")]
    said.append(words_of(fsdplaunch.load_checkpoint, new, model=model))
    said.append(words_of(save, new, model=model, extra={"model": plugin()}))
    model.register_buffer("huge", torch.zeros(1).expand(2**48))
    return [*said, words_of(save, new, model=model, step=1)]


def test_what_cannot_be_saved_or_loaded_is_refused_with_its_reason(two_ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "a-file").write_text("mine")
    for here, above, a_file, nothing, an_object, huge in two_ranks.run(refusals, str(tmp_path)):
        assert "is the folder the script runs in" in here
        assert "is the folder the script runs in" in above
        assert "a-file is a file" in a_file
        assert nothing == f"no complete checkpoint in {tmp_path}/new"
        assert "extra holds more than plain values and tensors" in an_object
        assert "the checkpoint needs 1024.0 TiB" in huge
        assert f"{tmp_path}/new has " in huge
    assert (tmp_path / "a-file").read_text() == "mine"
    assert not [path for path in (tmp_path / "new").rglob("*") if path.is_file()]


def test_folder_comes_from_the_configuration_when_none_is_given(two_ranks: RankPool, tmp_path: Path) -> None:
    paths = two_ranks.run(save_unnamed, env={"FSDPLAUNCH_CHECKPOINT_DIR": str(tmp_path / "here")})
    assert paths == [str(tmp_path / "here" / "checkpoint-4")] * 2


def save_unnamed() -> str:
    model, _, _ = fresh({"fsdp_version": 2})
    path = fsdplaunch.save_checkpoint(model=model, step=4)
    assert fsdplaunch.load_checkpoint(model=model)["step"] == 4
    return str(path)


# Checkpoints that do not fit, or that want to run code


def load_others(folder: str, form: str) -> list[str]:
    """What loading into models of fewer layers, of more, and of another width says."""
    said = []
    for options in ({"layers": 2}, {"layers": 4}, {"width": 32}):
        model, optimizer, _ = fresh(FORMS[form], **options, **OPTIONS[form])
        said.append(words_of(fsdplaunch.load_checkpoint, folder, model=model, optimizer=optimizer))
    return said


@pytest.mark.parametrize("form", ["1 sharded", "2 full"])
def test_checkpoint_of_another_model_is_refused_on_all_ranks(two_ranks: RankPool, saved: Any, form: str) -> None:
    for fewer, more, wider in two_ranks.run(load_others, str(saved(form)[0]), form):
        for message, words in ((fewer, "has layers.2"), (more, "lacks layers.3")):
            assert "is from another model" in message
            assert words in message
        assert "embed.weight" in wider


class Intruder:
    def __reduce__(self) -> Any:
        return os.system, ("touch intruder-was-here",)


INDEXES = {
    "index": pickle.dumps(Intruder()),
    "state of slots": b"\x80\x02cpathlib\nPosixPath\nX\x01\x00\x00\x00x\x85R"
    b"N}X\x06\x00\x00\x00parentX\x01\x00\x00\x00ys\x86b.",
    "distant memo": b"\x80\x02Nr" + (2**30).to_bytes(4, "little") + b".",
    "nested key": b"\x80\x02})" + b"\x85" * 200_000 + b"Ns.",
}
"""Hostile indexes: C pickle runs the first, changes a class by the second, takes 8 GB or dies of the others."""


@pytest.mark.parametrize("place", [*INDEXES, "full", "scheduler"])
def test_checkpoint_cannot_run_code_or_take_the_memory(
    two_ranks: RankPool, saved: Any, tmp_path: Path, place: str
) -> None:
    form = "2 full" if place == "full" else "2 sharded"
    folder = shutil.copytree(saved(form)[0], tmp_path / "checkpoint")
    (folder / "fsdplaunch.json").unlink()
    if place in INDEXES:
        (folder / "pytorch_model_fsdp_0" / ".metadata").write_bytes(INDEXES[place])
    else:
        name = "pytorch_model_fsdp.bin" if place == "full" else "scheduler.bin"
        torch.save({"x": Intruder()}, folder / name)
    for message, grown in two_ranks.run(load_intruder, str(folder), str(tmp_path), form):
        assert message.startswith("cannot ")
        assert grown < 300_000
        assert place not in INDEXES or "is not a checkpoint that is safe to read" in message
    assert not (tmp_path / "intruder-was-here").exists()


def load_intruder(folder: str, where: str, form: str) -> tuple[str, int]:
    """What loading says, and by how many KiB the process grew meanwhile."""
    with contextlib.chdir(where):
        model, optimizer, scheduler = fresh(FORMS[form], **OPTIONS[form])
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        held, state = peak_kib(), {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        return words_of(fsdplaunch.load_checkpoint, folder, **state), peak_kib() - held


def peak_kib() -> int:
    """The most memory this process had resident."""
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])  # type: ignore[index]


# Several models, and what other tools write


def several(folder: str, version: int, shared: bool) -> tuple[list[float], list[float]]:
    def make(seed: int) -> tuple[list[nn.Module], list[Any]]:
        models: list[Any] = [build(seed), build(seed + 1, layers=2)]
        params = [list(model.parameters()) for model in models]
        optimizers = [adamw(params[0] + params[1])] if shared else [adamw(each) for each in params]
        ready = fsdplaunch.prepare(*models, *optimizers, plugin=plugin(fsdp_version=version))
        return list(ready[:2]), list(ready[2:])

    def run(models: list[nn.Module], optimizers: list[Any], first: int) -> list[float]:
        losses = []
        for step in range(first, first + HALF):
            ids = my_part(batch(step))
            loss = loss_of(models[0], ids) + loss_of(models[1], ids)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    models, optimizers = make(0)
    run(models, optimizers, 0)
    fsdplaunch.save_checkpoint(folder, model=models, optimizer=optimizers)
    kept_on = run(models, optimizers, HALF)
    models, optimizers = make(50)
    fsdplaunch.load_checkpoint(folder, model=models, optimizer=optimizers)
    return kept_on, run(models, optimizers, HALF)


@pytest.mark.parametrize(("version", "shared"), [(1, True), (2, False)])
def test_several_models_go_on_as_saved(two_ranks: RankPool, tmp_path: Path, version: int, shared: bool) -> None:
    for kept_on, resumed in two_ranks.run(several, str(tmp_path), version, shared):
        assert largest_difference(kept_on, resumed) < 1e-6
    second = "pytorch_model_fsdp_1" if version == 2 else "pytorch_model_fsdp_1.bin"
    assert (tmp_path / second).exists()


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](x))


def unused_parameter(folder: str, fields: dict[str, Any]) -> tuple[int, int]:
    def make() -> tuple[Any, Any]:
        model = Unused()
        return fsdplaunch.prepare(model, adamw(model.parameters()), plugin=plugin(**fields))

    model, optimizer = make()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    had = len(optimizer.state)
    fsdplaunch.save_checkpoint(folder, model=model, optimizer=optimizer)
    model, optimizer = make()
    fsdplaunch.load_checkpoint(folder, model=model, optimizer=optimizer)
    return had, len(optimizer.state)


@pytest.mark.parametrize(("form", "kept"), [("2 sharded", 4), ("1 full", 2)])
def test_parameter_that_never_had_a_gradient_has_no_state_after_loading(
    two_ranks: RankPool, tmp_path: Path, form: str, kept: int
) -> None:
    """Under FSDP1 this rank has half of the weights, and the other rank the rest."""
    assert two_ranks.run(unused_parameter, str(tmp_path), FORMS[form])[0] == (kept, kept)


# Compiled models


def compiled(folder: str, how: str, fields: dict[str, Any]) -> tuple[list[float], list[float], list[str]]:
    def make(seed: int) -> tuple[Any, Any]:
        model: Any = build(seed, layers=1)
        if how == "blocks":
            for index, layer in enumerate(model.layers):
                model.layers[index] = torch.compile(layer, backend="eager")
        elif how == "whole":
            model = torch.compile(model, backend="eager")
        model, optimizer = fsdplaunch.prepare(model, adamw(model.parameters()), plugin=plugin(**fields))
        return torch.compile(model, backend="eager") if how == "after" else model, optimizer

    model, optimizer = make(0)
    with fsdplaunch.no_sync(model):
        loss_of(model, my_part(batch(0))).backward()
    optimizer.zero_grad()
    train_sharded(model, optimizer, 1)
    path = fsdplaunch.save_checkpoint(folder, model=model, optimizer=optimizer)
    kept_on = train_sharded(model, optimizer, 2, first=1)
    model, optimizer = make(9)
    fsdplaunch.load_checkpoint(folder, model=model, optimizer=optimizer)
    sharded = path / "pytorch_model_fsdp_0"
    names = [entry.name for entry in read_index(sharded).entries] if sharded.exists() else []
    return kept_on, train_sharded(model, optimizer, 2, first=1), names


COMPILED = {
    "blocks": {"fsdp_version": 2, "activation_checkpointing": True},
    "whole": {"fsdp_version": 2, "state_dict_type": "FULL_STATE_DICT"},
    "after": {"fsdp_version": 1},
}


@pytest.mark.parametrize("how", COMPILED)
def test_compiled_model_goes_on_as_saved_under_its_own_names(
    two_ranks: RankPool, tmp_path: Path, how: str
) -> None:
    kept_on, resumed, names = two_ranks.run(compiled, str(tmp_path), how, COMPILED[how])[0]
    assert largest_difference(kept_on, resumed) < 1e-5
    assert not names or set(names) == {f"model.{name}" for name in build(layers=1).state_dict()}
