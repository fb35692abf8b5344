"""What a folder is, without torch: which kind of checkpoint, and where the model inside it stands."""

from dataclasses import dataclass
from pathlib import Path

from fsdplaunch.checkpoint.index import INDEX_NAME
from fsdplaunch.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A model's sharded checkpoint.

    Attributes:
        given: What the user pointed at.
        folder: The folder with the index.
    """

    given: Path
    folder: Path


def find_model(given: Path) -> Found:
    """Return the model's checkpoint folder at or below `given`."""
    if (given / INDEX_NAME).is_file():
        return Found(given=given, folder=given)
    msg = f"{given} holds no sharded checkpoint"
    raise CheckpointError(msg)
