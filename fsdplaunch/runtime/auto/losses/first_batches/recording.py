"""Take the recording of first batches away when a script's hooks go."""

from collections.abc import Iterator
from contextlib import contextmanager

from fsdplaunch.runtime.auto.losses.first_batches.recorder import Recorder


@contextmanager
def recording_first_batches(recorder: Recorder) -> Iterator[None]:
    """Let a recorder record as long as it needs to, and not beyond this."""
    try:
        yield
    finally:
        recorder.remove()
