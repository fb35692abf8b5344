"""Notices that torch's own functions give each other, and that a user can do nothing about."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Suppress notices of future changes, of typed storages (by torch 2.7 itself), of ranks that load alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield
