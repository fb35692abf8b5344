"""Check that a pickle holds plain values and tensors, before anything else reads it.

Torch itself reads plain values without running code, but a file can still end the process: by a nest of tuples
that is a key, by numbers of a million digits, by a list that everything refers to. What passes here is of few
opcodes and of bounded memory, and has no key that takes long to hash; nothing is kept of it.
"""

from typing import Any

from fsdplaunch.checkpoint.invalid_file import InvalidFileError
from fsdplaunch.checkpoint.safe_pickle.interpreter import Interpreter, PickledCallable
from fsdplaunch.checkpoint.safe_pickle.rank_file_classes import RANK_FILE_NAMES
from fsdplaunch.checkpoint.safe_pickle.tensor_classes import foreign, storage_of
from fsdplaunch.checkpoint.safe_pickle.unpickle import read_next, unpickle

# How older files of torch.save begin: a number, a version, the machine, the object, its storages' keys.
_OLD_PICKLES = 5
_STORAGE_FIELDS = 5


def _value(_: tuple[Any, ...]) -> None:
    """Stand for a value that is of no interest here."""


def _rebuilt(name: str) -> tuple[tuple[str, str], PickledCallable]:
    return ("torch._utils", name), PickledCallable(f"torch._utils.{name}", call=_value)


# What torch's reader makes of plain values besides what state dicts hold.
_PLAIN_NAMES: dict[tuple[str, str], Any] = {
    **RANK_FILE_NAMES,
    **{
        (home, kind): PickledCallable(f"{home}.{kind}", call=_value)
        for home, kind in (
            *(
                (builtins, kind)
                for builtins in ("builtins", "__builtin__")
                for kind in ("set", "complex", "bytearray")
            ),
            *(("collections", "Counter"), ("collections", "defaultdict"), ("_codecs", "encode")),
            *(("torch", "device"), ("torch.serialization", "_get_layout")),
        )
    },
    **dict(
        map(
            _rebuilt,
            ("_rebuild_tensor", "_rebuild_sparse_tensor", "_rebuild_qtensor", "_rebuild_meta_tensor_no_storage"),
        )
    ),
}


def check_plain(data: bytes, where: str) -> None:
    """Check the description that a file of torch.save holds.

    Raises:
        CheckpointError: It names what plain values have no use for, is damaged, or asks for much memory.
    """
    unpickle(data, _PLAIN_NAMES, persistent=storage_of, unknown=foreign, where=where)


def check_old_plain(data: bytes, where: str) -> None:
    """Check the pickles at the start of a file that torch.save wrote before it wrote zip files.

    Raises:
        CheckpointError: As in `check_plain`.
    """
    interpreter = Interpreter(data, _PLAIN_NAMES, _old_storage, foreign)
    for _ in range(_OLD_PICKLES):
        read_next(interpreter, where)


def _old_storage(key: tuple[Any, ...]) -> Any:
    """Return the storage of a `('storage', class, key, device, size, view)`."""
    if len(key) != _STORAGE_FIELDS + 1 or key[-1] is not None:
        msg = "its storage is a view of another one"
        raise InvalidFileError(msg)
    return storage_of(key[:_STORAGE_FIELDS])
