"""Checkpoints with flipped bits, cuts, odd files and hostile pickles: the right weights or one clear error."""

import io
import os
import pickle
import random
import tempfile
import threading
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
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
_OPCODES = (
    *(b"]", b"}", b")", b"N", b"(", b"t", b"\x85", b"\x94", b"K\x01", b"\x8c\x02ab", b"h\x00", b"s", b"u", b"e"),
    *(b"r\xff\xff\xff\x7f", b"cos\nsystem\n", b"R", b"b", b"\x81", b"I9999\n", b"Q", b"ctorch\nSize\n", b"\x86"),
    *(
        b"\x93",
        b"\x82\x01",
        b"\x84\xff\xff\xff\x7f",
        b"P1\n",
        b"ios\nsystem\n",
        b"o",
        b"\x92",
        b"\x8f",
        b"\x91",
        b"\x90",
    ),
    *(
        b"\x96" + b"\xff" * 7 + b"\x7f",
        b"\x97",
        b"\x98",
        b"\x8d" + b"\xff" * 8,
        b"\x8b\xff\xff\xff\x7f",
        b"2",
        b"0",
        b"1",
    ),
    *(
        b"g7\n",
        b"p99999999999\n",
        b"L" + b"9" * 5000 + b"L\n",
        b"F1e999\n",
        b"\x95" + b"\xff" * 8,
        b"T\xff\xff\xff\x7f",
    ),
    *(
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n",
        b"ccollections\nOrderedDict\n",
        b"cpathlib\nPosixPath\n",
    ),
    *(
        b"ctorch._utils\n_rebuild_tensor_v2\n",
        b"c__builtin__\ngetattr\n",
        b"cfunctools\npartial\n",
        b"d",
        b"l",
        b"q\x05",
    ),
)
"""Opcodes of pickles, all kinds: references, classes, calls, state, lengths that are not there."""
_RECORDS = {b"PK\1\2": range(4, 46), b"PK\3\4": range(4, 30), b"PK\5\6": range(4, 22), b"PK\6\6": range(4, 56)}
"""Records of a zip, and where in them their fields are."""


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


def _zip_field(folder: Path, chance: random.Random) -> None:
    """Change a field of a zip's record: flags, method, sizes, offsets, lengths of names."""
    path = chance.choice(sorted(folder.glob("*.distcp")))
    data = bytearray(path.read_bytes())
    places = [(at, kind) for kind in _RECORDS for at in _places(data, kind)]
    at, kind = chance.choice(places)
    field = at + chance.choice(_RECORDS[kind])
    wide = chance.choice([1, 2, 4])
    data[field : field + wide] = chance.choice([b"\xff", b"\x00", b"\x01", b"\x08"]) * wide
    path.write_bytes(data)


def _places(data: bytearray, mark: bytes) -> Iterator[int]:
    at = data.find(mark)
    while at >= 0:
        yield at
        at = data.find(mark, at + 1)


def _swapped(folder: Path, chance: random.Random) -> None:
    """Have files change places with others, links and odd files while they are read."""
    path = chance.choice(sorted(folder.iterdir()))
    good, ways = path.read_bytes(), (_cut, _odd, _flip)
    seed = chance.random()

    def swap() -> None:
        own, end = random.Random(seed), time.monotonic() + 0.3
        while time.monotonic() < end:
            with suppress(OSError, IndexError, ValueError):
                own.choice(ways)(folder, own)
            with suppress(OSError):
                other = folder.parent / "good"
                other.write_bytes(good)
                if path.is_dir():
                    path.rmdir()
                other.replace(path)

    threading.Thread(target=swap, daemon=True).start()


def _links(folder: Path, _chance: random.Random) -> None:
    """Have every file be a link, hard or symbolic, to one that stands elsewhere: that is no damage."""
    elsewhere = folder.parent / "else\nwhere"
    elsewhere.mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(elsewhere / path.name)
        (path.hardlink_to if number % 2 else path.symlink_to)(elsewhere / path.name)


def _sizes(folder: Path, chance: random.Random) -> None:
    """Change one number of the index: a size, an offset, a length, how many dimensions or chunks."""
    path = folder / ".metadata"
    index = pickle.loads(path.read_bytes())
    wrong = chance.choice([-1, 0, 1, 7, 599, 601, 2**31, 2**62, 2**63, 2**70, True, 1.5, None])
    key, place = chance.choice(sorted(index.storage_data.items(), key=str))
    tensor = index.state_dict_metadata[key.fqn]
    match chance.choice(
        ["offset", "length", "size", "chunk size", "chunk offset", "no chunk", "twice", "dimensions"]
    ):
        case "offset":
            place.offset = wrong
        case "length":
            place.length = wrong
        case "size":
            tensor.size = (wrong, 30)
        case "chunk size":
            tensor.chunks[0].sizes = (20, wrong)
        case "chunk offset":
            tensor.chunks[0].offsets = (wrong, 0)
        case "no chunk":
            tensor.chunks.clear()
        case "twice":
            tensor.chunks.append(tensor.chunks[0])
        case "dimensions":
            tensor.size = tensor.chunks[0].sizes = (1,) * chance.choice([0, 1, 63, 65, 5000])
    path.write_bytes(pickle.dumps(index))


def _opcodes(folder: Path, chance: random.Random) -> None:
    (folder / ".metadata").write_bytes(_pickle(chance))


def _pickle(chance: random.Random) -> bytes:
    """Return opcodes of all kinds in a random order, often the same one very often."""
    body = b""
    for _ in range(chance.randrange(1, 12)):
        each = chance.choice(_OPCODES)
        body += each * min(chance.choice([1, 1, 1, 2, 9, 200_000]), 2_000_000 // len(each))
    return b"\x80\x04" + body + b"."


SPOILS: dict[str, Spoil] = {
    **{"flipped bit": _flip, "cut": _cut, "odd file": _odd, "opcodes": _opcodes},
    **{"zip field": _zip_field, "swapped while read": _swapped, "links": _links, "sizes": _sizes},
}


def cases(chance: random.Random, count: int | None) -> Iterator[Case]:
    """Make the cases: damage of every kind to a checkpoint, which is merged and loaded, and to a small file."""
    warnings.simplefilter("ignore")  # of torch, that it saves in one process
    for number in range(count or COUNT):
        name, seed = chance.choice([*SPOILS, "flipped bit", "small file"]), chance.random()
        if name == "small file":
            yield Case(name=f"{number}: {name}", attack=lambda s=seed: _read_small(random.Random(s)))
        else:
            yield Case(name=f"{number}: {name}", attack=lambda n=name, s=seed: _read(SPOILS[n], random.Random(s)))


def _read(spoil: Spoil, chance: random.Random) -> None:
    """Spoil a checkpoint, merge it and load it, and raise unless each is right or one clear error."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as base:  # files may still change places
        folder, out = Path(base, "ckpt"), Path(base, "out")
        dcp.save(_WEIGHTS, checkpoint_id=folder, no_dist=True)
        spoil(folder, chance)
        start = time.monotonic()
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
    if any(words in str(problem) for words in ("Missing key in checkpoint", "Size mismatch between saved")):
        return  # torch's words for what is of another model
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
