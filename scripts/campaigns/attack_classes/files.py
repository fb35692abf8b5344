"""Checkpoints with flipped bits, cuts, odd files and hostile pickles: the right weights or one clear error."""

import io
import os
import pickle
import random
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException

from fsdplaunch.checkpoint.merge.merge import merge
from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.saving.plain_files import read_plain
from fsdplaunch.runtime.saving.safe_dcp_reader import SafePlanner, SafeReader
from scripts.campaigns.attack_classes.case import Case

COUNT = 400
MOST_SECONDS = 20.0
"""How long one small checkpoint may be looked at."""
_WEIGHTS = {"model": {f"layers.{n}.weight": torch.arange(n * 700.0, n * 700 + 600).view(20, 30) for n in range(3)}}
Spoil = Callable[[Path, random.Random], None]


def _flip(folder: Path, chance: random.Random) -> None:
    path = chance.choice(sorted(folder.iterdir()))
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def _cut(folder: Path, chance: random.Random) -> None:
    path = chance.choice(sorted(folder.iterdir()))
    os.truncate(path, chance.randrange(path.stat().st_size))


def _odd(folder: Path, chance: random.Random) -> None:
    path = chance.choice(sorted(folder.iterdir()))
    path.unlink()
    kinds = (
        os.mkfifo,
        Path.mkdir,
        lambda place: place.symlink_to(place.name),
        lambda place: place.symlink_to("/dev/zero"),
    )
    chance.choice(kinds)(path)


def _opcodes(folder: Path, chance: random.Random) -> None:
    (folder / ".metadata").write_bytes(_pickle(chance))


def _pickle(chance: random.Random) -> bytes:
    """Return opcodes of all kinds in a random order, often the same one very often."""
    some = [
        b"]",
        b"}",
        b")",
        b"N",
        b"(",
        b"t",
        b"\x85",
        b"\x94",
        b"K\x01",
        b"\x8c\x02ab",
        b"h\x00",
        b"s",
        b"u",
        b"e",
    ]
    some += [
        b"r\xff\xff\xff\x7f",
        b"cos\nsystem\n",
        b"R",
        b"b",
        b"\x81",
        b"I9999\n",
        b"Q",
        b"ctorch\nSize\n",
        b"\x86",
    ]
    body = b"".join(
        chance.choice(some) * chance.choice([1, 1, 1, 2, 9, 200_000]) for _ in range(chance.randrange(1, 12))
    )
    return b"\x80\x04" + body + b"."


SPOILS: dict[str, Spoil] = {"flipped bit": _flip, "cut": _cut, "odd file": _odd, "opcodes": _opcodes}


def cases(chance: random.Random, count: int | None) -> Iterator[Case]:
    """Make the cases: damage of every kind to a checkpoint, which is merged and loaded, and to a small file."""
    for number in range(count or COUNT):
        name, seed = chance.choice([*SPOILS, "flipped bit", "small file"]), chance.random()
        if name == "small file":
            yield Case(name=f"{number}: {name}", attack=lambda s=seed: _read_small(random.Random(s)))
        else:
            yield Case(name=f"{number}: {name}", attack=lambda n=name, s=seed: _read(SPOILS[n], random.Random(s)))


def _read(spoil: Spoil, chance: random.Random) -> None:
    """Spoil a checkpoint, merge it and load it, and raise unless each is right or one clear error."""
    with tempfile.TemporaryDirectory() as base:
        folder, out, start = Path(base, "ckpt"), Path(base, "out"), time.monotonic()
        dcp.save(_WEIGHTS, checkpoint_id=folder, no_dist=True)
        spoil(folder, chance)
        try:
            merge(folder, out)
        except Exception as problem:
            _check_refusal(problem)
            assert not out.exists()
        else:
            _check_same(load_file(out / "model.safetensors"))
        state = {"model": {key: torch.zeros_like(value) for key, value in _WEIGHTS["model"].items()}}
        try:
            reader = SafeReader(folder)
            reader.read_metadata()  # as load_checkpoint does: torch wraps what comes later
            dcp.load(state, storage_reader=reader, planner=SafePlanner(), no_dist=True)
        except (Exception, CheckpointException) as problem:
            inner = getattr(problem, "failures", None)
            _check_refusal(next(iter(inner.values()))[0] if inner else problem)
        else:
            _check_same(state["model"])
        assert time.monotonic() - start < MOST_SECONDS


def _check_refusal(problem: BaseException) -> None:
    if isinstance(problem, RuntimeError) and "Missing key in checkpoint" in str(problem):
        return  # torch's words for a name with a flipped bit, which load_checkpoint has words of its own for
    assert isinstance(problem, CheckpointError), repr(problem)
    assert len(problem.message) < 4096


def _check_same(found: dict[str, torch.Tensor]) -> None:
    assert found.keys() == _WEIGHTS["model"].keys()
    assert all(torch.equal(value, found[key]) for key, value in _WEIGHTS["model"].items())


def _read_small(chance: random.Random) -> None:
    """Read a file of torch.save whose description is something else."""
    with tempfile.TemporaryDirectory() as base:
        path, box = Path(base, "f"), io.BytesIO()
        torch.save({"a": 1}, box)
        hostile = chance.choice([_pickle(chance), pickle.dumps(os.getcwd, 2), pickle.dumps(chance.getstate(), 2)])
        with zipfile.ZipFile(box) as old, zipfile.ZipFile(path, "w") as new:
            for each in old.infolist():
                new.writestr(each.filename, hostile if each.filename.endswith("data.pkl") else old.read(each))
        try:
            read_plain(path)
        except Exception as problem:
            _check_refusal(problem)
