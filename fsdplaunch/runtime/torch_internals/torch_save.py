"""What `torch.save` writes its file with, and the functions that such a file names."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._utils import _rebuild_tensor_v2, _rebuild_tensor_v3


def zip_writer(path: str) -> Any:
    """Return torch's writer of the file that `torch.save` writes; all versions."""
    return torch._C.PyTorchFileWriter(path)


@contextmanager
def around_writing(write: Callable[[torch.UntypedStorage, Callable[[], None]], None]) -> Iterator[None]:
    """Let `write(storage, go_on)` write each storage of a file of `torch.save`, whose pickle stands by then.

    All versions open their file by one function and write a storage by one method of what it gives.
    """
    opened: Any = torch.serialization._open_zipfile_writer
    with patch.object(torch.serialization, "_open_zipfile_writer", lambda *args: _Opened(opened(*args), write)):
        yield


class _Opened:
    """Torch's context of an open file, which gives a writer that asks before each storage."""

    def __init__(self, context: Any, write: Any) -> None:
        self.context, self.write = context, write

    def __enter__(self) -> Any:
        return _Writer(self.context.__enter__(), self.write)

    def __exit__(self, *args: object) -> None:
        self.context.__exit__(*args)


class _Writer:
    def __init__(self, inner: Any, write: Any) -> None:
        self.inner, self.write = inner, write

    def write_record(self, name: str, data: Any, size: int) -> None:
        """Write bytes, a text, or a storage."""

        def go_on() -> None:
            self.inner.write_record(name, data, size)

        if isinstance(data, torch.UntypedStorage):
            self.write(data, go_on)
        else:
            go_on()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def tensor_builder(*, with_dtype: bool) -> Callable[..., Any]:
    """Return the function that files of `torch.save` name to build a tensor from its storage; all versions."""
    return _rebuild_tensor_v3 if with_dtype else _rebuild_tensor_v2
