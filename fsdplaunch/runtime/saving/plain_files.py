"""Small files of plain values and tensors, written and read: none of their code runs, none is read unchecked."""

import io
import os
import pickle
import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from fsdplaunch.checkpoint.readers.torch_zip import ReadWindow, data_start, file_window, read_whole
from fsdplaunch.checkpoint.safe_pickle.tensor_classes import check_plain
from fsdplaunch.checkpoint.untrusted_files import InvalidFileError, open_regular, refuse, short
from fsdplaunch.errors import CheckpointError
from fsdplaunch.files import durable_file
from fsdplaunch.runtime import messages

_STEP = 4 * 2**20


def load_plain(data: bytes, where: str) -> Any:
    """Return the value that the bytes of a file of torch.save hold, if they are whole and it is plain."""
    _check(ReadWindow(lambda offset, count: data[offset : offset + count], len(data)), where, checksums=True)
    return _loaded(io.BytesIO(data), where)


def read_plain(path: Path, *, checksums: bool = True) -> Any:
    """Read a file back as `load_plain` does. Tensors of a large file stay there until they are used.

    All of it is compared with its checksums first, where it has them and they are asked for.
    """
    try:
        fd = open_regular(path)
    except InvalidFileError as problem:
        msg = f"cannot read {path}: {problem}"
        raise CheckpointError(msg, hint="put the real file there, readable by the user who runs this") from None
    try:
        _check(file_window(fd), str(path), checksums=checksums)
    finally:
        os.close(fd)
    return _loaded(path, str(path), mmap=True)


def _check(window: ReadWindow, where: str, *, checksums: bool) -> None:
    try:
        if window.length < 2 or window.bytes_at(0, 2) != b"PK":  # noqa: PLR2004
            refuse("it is not a zip file, as torch.save has written since 1.6")
        built, description = read_whole(window)
        if len({name.lower() for name in built.members}) != len(built.members):
            refuse("its table of contents lists a file twice")  # torch's reader does not look at the case
        check_plain(description, where)
        for name, member in built.members.items() if checksums else ():
            if not member.crc:
                continue
            start, crc = data_start(window, name, member, window.length), 0
            for offset in range(0, member.size, _STEP):
                crc = crc32(window.bytes_at(start + offset, min(_STEP, member.size - offset)), crc)
            if member.crc != crc:
                refuse(f"{short(name)} does not match its checksum")
    except InvalidFileError as problem:
        msg = f"cannot read {where}: {problem}"
        raise CheckpointError(msg, hint="the file is damaged; copy it again, or use an older checkpoint") from None


def _loaded(source: Path | io.BytesIO, where: str, *, mmap: bool = False) -> Any:
    try:
        return torch.load(source, weights_only=True, map_location="cpu", mmap=mmap)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError, TypeError) as error:
        msg = f"cannot read {where}: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
        hint = "the file is damaged, or holds objects that only running code could read"
        raise CheckpointError(msg, hint=hint) from None


def packed(value: Any, what: str) -> bytes:
    """Return a value as a file's bytes; a CheckpointError if only running code could bring it back."""
    data = _serialized(value)
    try:
        load_plain(data, what)
    except CheckpointError:
        msg = f"{what} holds more than plain values and tensors"
        hint = "give numbers, texts, lists, mappings and tensors; save other objects in a file of your own"
        raise CheckpointError(msg, hint=hint) from None
    return data


def _serialized(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def write_large(value: Any, path: Path) -> None:
    """Write tensors straight to a file, without a copy of them in memory, and force it to disk."""
    with durable_file(path) as file:
        torch.save(value, file)


_others: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {}


def keep_generator(name: str, state: Callable[[], Any], put_back: Callable[[Any], None]) -> None:
    """Have checkpoints hold one more generator, under accelerate's name for it, whose state is a plain value."""
    _others[name] = (state, put_back)


def file_name(rank: int) -> str:
    """Return the name of a rank's file in a checkpoint."""
    return f"random_states_{rank}.pkl"


def random_states(step: int | None) -> dict[str, Any]:
    """Return the state of Python's, numpy's (if it is in use), torch's and other kept generators.

    Nothing changes it later.
    """
    states: dict[str, Any] = {
        "step": step or 0,
        "random_state": random.getstate(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["torch_cuda_manual_seed"] = torch.cuda.get_rng_state_all()
    states |= {name: state() for name, (state, _) in _others.items()}
    if "numpy" in sys.modules:
        states["numpy_random_seed"] = sys.modules["numpy"].random.get_state()
    return states


def packed_random_states(states: Mapping[str, Any]) -> bytes:
    """Return the states of the generators as a file's bytes."""
    states = dict(states)
    if "numpy_random_seed" in states:
        kind, keys, *rest = states["numpy_random_seed"]
        states["numpy_random_seed"] = (kind, keys.tolist(), *rest)  # a list, so that reading it needs no numpy
    return _serialized(states)


def read_random_states(path: Path) -> None:
    """Put the generators back as they were."""
    states = read_plain(path)
    try:
        if not isinstance(states, dict):
            msg = f"a {type(states).__name__}"
            raise TypeError(msg)
        random.setstate(_tuples(states["random_state"]))
        torch.set_rng_state(states["torch_manual_seed"])
        of_gpus = states.get("torch_cuda_manual_seed", ())
        if of_gpus and torch.cuda.is_available():
            if len(of_gpus) == (here := torch.cuda.device_count()):
                torch.cuda.set_rng_state_all(of_gpus)
            else:  # nothing says which of them was this worker's
                messages.say(
                    f"GPU random states are not restored: the checkpoint has {len(of_gpus)}, this node {here} GPUs"
                )
        for name, (_, put_back) in _others.items():
            if name in states:
                put_back(states[name])
        if "numpy" in sys.modules and "numpy_random_seed" in states:
            sys.modules["numpy"].random.set_state(states["numpy_random_seed"])
    except (TypeError, ValueError, LookupError, ArithmeticError, RuntimeError, AttributeError) as error:
        msg = f"{path} holds no states of random number generators: {type(error).__name__}: {error}"
        raise CheckpointError(msg, hint="the file is damaged; copy it again, or use an older checkpoint") from None


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list | tuple) else value
