"""Checkpoints whose files are of another save, damaged or exchanged: what is loaded and merged is one save.

Each case is a run of two workers, which saves three steps, in one form, with all values equal to the step. Then it
spoils copies of the third, again and again, loads each and merges it: every value is a 3, or the error is ours.
"""

import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scripts.campaigns.attack_classes.case import Case
from scripts.campaigns.attack_classes.runs import ROOT, end_all, launch
from scripts.campaigns.attack_classes.whole_saves import fill, make_training

COUNT = 20
CHANGES = 100
"""How many each run makes."""
FORMS = {
    "FSDP2, sharded": (2, "SHARDED_STATE_DICT"),
    "FSDP1, sharded": (1, "SHARDED_STATE_DICT"),
    "FSDP2, full": (2, "FULL_STATE_DICT"),
    "FSDP1, local": (1, "LOCAL_STATE_DICT"),
}
STEP = 3
_SECONDS = 240.0
_SCRIPT = "from scripts.campaigns.attack_classes.changed_saves import work\nwork()\n"


def cases(chance: random.Random, count: int | None) -> Iterator[Case]:
    """Make the cases: each form in turn."""
    for number in range(count or COUNT):
        name, seed = list(FORMS)[number % len(FORMS)], chance.randrange(10**9)
        title = f"{number}: {CHANGES} changes, {name}"
        yield Case(name=title, attack=lambda name=name, seed=seed: spoil_all(name, seed))


def spoil_all(form: str, seed: int) -> None:
    """Run one form; raise when anything was loaded or merged that is not the save, without an error."""
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base)
        version, kind = FORMS[form]
        words = ("--num-processes", "2", "--set", f"launch.env={{FORM: '{version} {kind}', SEED: '{seed}'}}")
        run = launch(folder, _SCRIPT, *words, PYTHONPATH=str(ROOT))
        (said,) = end_all([run], _SECONDS)
        found = folder / "found.json"
        assert found.exists(), said[-2000:]
        wrong = json.loads(found.read_text())
        assert wrong["silent"] == [], wrong["silent"][:5]
        assert wrong["odd"] == [], wrong["odd"][:5]
        assert wrong["right"] + wrong["refused"] == CHANGES, wrong


Change = Callable[[Path, Path, random.Random], None]
"""What spoils a checkpoint, beside others of the same run."""


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _other(place: Path, others: Path, chance: random.Random) -> Path:
    return others / f"checkpoint-{chance.choice([1, 2])}" / place


def file_of_another(folder: Path, others: Path, chance: random.Random) -> None:
    """Put one file of an earlier save into its place."""
    path = chance.choice(_files(folder))
    shutil.copyfile(_other(path.relative_to(folder), others, chance), path)


def folder_of_another(folder: Path, others: Path, chance: random.Random) -> None:
    """Put a whole model's or optimizer's folder of an earlier save into its place, or all but the manifest."""
    below = sorted(path for path in folder.iterdir() if path.is_dir()) or [folder]
    place = chance.choice(below)
    shutil.copytree(
        _other(place.relative_to(folder), others, chance),
        place,
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("fsdplaunch.json"),
    )


def exchanged(folder: Path, _others: Path, chance: random.Random) -> None:
    """Exchange the files of two ranks."""
    pairs = [
        (one, other)
        for one in _files(folder)
        for other in _files(folder)
        if one < other and one.parent == other.parent and one.suffix == other.suffix != ".json"
    ]
    one, other = chance.choice(pairs)
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def half_copied(folder: Path, others: Path, chance: random.Random) -> None:
    """Leave a copy over an earlier save as one that was interrupted, in the middle of a file or between two."""
    files = _files(folder)
    place = chance.randrange(len(files))
    for path in files[place + 1 :]:
        shutil.copyfile(_other(path.relative_to(folder), others, chance), path)
    data, old = files[place].read_bytes(), _other(files[place].relative_to(folder), others, chance).read_bytes()
    cut = chance.randrange(len(data))
    files[place].write_bytes(data[:cut] + old[cut:])


def flipped(folder: Path, _others: Path, chance: random.Random) -> None:
    """Change a bit of any file."""
    _flip(chance.choice(_files(folder)), chance)


def flipped_manifest(folder: Path, _others: Path, chance: random.Random) -> None:
    """Change a bit of the manifest."""
    _flip(folder / "fsdplaunch.json", chance)


def _flip(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def edited_manifest(folder: Path, _others: Path, chance: random.Random) -> None:
    """Change a number or a word of the manifest, or leave a key out."""
    path = folder / "fsdplaunch.json"
    data = json.loads(path.read_text())
    key = chance.choice([key for key in data if key not in ("checksum", "config", "versions", "complete")])
    if chance.random() < 0.3:
        del data[key]
    else:
        data[key] = {int: 7, str: "x", list: [], dict: {}}.get(type(data[key]), 5)
    path.write_text(json.dumps(data))


def cut_or_gone(folder: Path, _others: Path, chance: random.Random) -> None:
    """Cut a file, or remove it."""
    path = chance.choice([path for path in _files(folder) if path.name != "fsdplaunch.json"])
    if chance.random() < 0.5:
        path.unlink()
    else:
        os.truncate(path, chance.randrange(path.stat().st_size))


KINDS: tuple[Change, ...] = (
    *(file_of_another, file_of_another, folder_of_another, exchanged, half_copied),
    *(flipped, flipped_manifest, edited_manifest, cut_or_gone),
)


def work() -> None:
    """Be a worker: save, spoil, load, merge; rank 0 writes what came of it."""
    import torch
    import torch.distributed as dist

    import fsdplaunch
    from fsdplaunch.errors import LaunchError

    version, kind = os.environ["FORM"].split()
    model, optimizer, scheduler = make_training(int(version), kind)
    for step in range(1, STEP + 1):
        fill(model, optimizer, scheduler, step)
        torch.manual_seed(100 * step + dist.get_rank())
        extra = {"n": step}
        fsdplaunch.save_checkpoint(
            "saves", model=model, optimizer=optimizer, scheduler=scheduler, extra=extra, step=step
        )
    generator = torch.manual_seed(100 * STEP + dist.get_rank()).get_state()
    told: dict[str, Any] = {"silent": [], "odd": [], "right": 0, "refused": 0}
    sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115  (what is passed over is said, some hundred times)
    for number in range(CHANGES):
        chance = random.Random(int(os.environ["SEED"]) + number)
        kind_of_change = chance.choice(KINDS)
        place = Path("spoilt")
        if dist.get_rank() == 0:
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(f"saves/checkpoint-{STEP}", place)
            kind_of_change(place, Path("saves"), chance)
        dist.barrier()
        fill(model, optimizer, scheduler, 0)
        torch.manual_seed(1)
        problem = None
        try:
            state = fsdplaunch.load_checkpoint(place, model=model, optimizer=optimizer, scheduler=scheduler)
        except (LaunchError, FileNotFoundError) as error:
            problem = error
        wrong = [] if problem else _wrong(model, optimizer, scheduler, state, generator)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (str(problem or ""), wrong))
        title = f"{number} {kind_of_change.__name__}"
        if any(wrong for _, wrong in everyone):
            told["silent"].append(f"{title}: loaded {everyone}")
        elif len({bool(said) for said, _ in everyone}) > 1:
            told["odd"].append(f"{title}: {everyone}")
        else:
            told["refused" if problem else "right"] += 1
        if dist.get_rank() == 0 and "SHARDED" in kind:
            told["silent"] += [f"{title}: merged {value}" for value in _merged(place)]
    if dist.get_rank() == 0:
        Path("found.json").write_text(json.dumps(told))


def _wrong(model: Any, optimizer: Any, scheduler: Any, state: Any, generator: Any) -> list[str]:
    """Return what is not of the last step."""
    import torch

    from fsdplaunch.runtime.torch_internals.distributed import local_tensor

    found = []
    for param in model.parameters():
        for each in (param, *optimizer.state.get(param, {}).values()):
            local = local_tensor(each) if hasattr(each, "device_mesh") else each
            found += [float(one) for one in local.detach().unique()]
    values = {"tensors": set(found), "scheduler": {scheduler.last_epoch}, "step": {state["step"]}}
    values["extra"] = {state["extra"].get("n")}
    wrong = [f"{name} {sorted(map(str, those))}" for name, those in values.items() if those != {STEP}]
    return wrong + ([] if torch.equal(torch.get_rng_state(), generator) else ["another generator"])


def _merged(place: Path) -> list[float]:
    """Return the values of a merge that are not those of the save that the manifest is of."""
    from safetensors.numpy import load_file

    from fsdplaunch.checkpoint.manifest import read_manifest
    from fsdplaunch.checkpoint.merge.merge import merge
    from fsdplaunch.errors import LaunchError

    shutil.rmtree("merged", ignore_errors=True)
    try:
        merge(place, Path("merged"))
    except LaunchError:
        return []
    found = {float(one) for each in load_file("merged/model.safetensors").values() for one in each.flat}
    # An earlier save may have come whole, with its manifest.
    return sorted(found - {float((read_manifest(place) or {}).get("step", STEP))})
