"""Why a folder is not one model's checkpoint: it holds several, none, or a format that is not merged from here."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fsdplaunch.checkpoint.index_file import INDEX_NAME
from fsdplaunch.checkpoint.invalid_file import short
from fsdplaunch.errors import CheckpointError, LaunchError, UsageError
from fsdplaunch.name_lists import listed

MAX_DEPTH = 3

MAX_LISTED = 10

DATA_FILE = re.compile(r"__\d+_\d+\.distcp")


class AmbiguousError(UsageError):
    """Several checkpoints stand where one was expected.

    Attributes:
        candidates: Their folders.
    """

    def __init__(self, message: str, candidates: Iterable[Path]) -> None:
        super().__init__(message, hint="give one of them")
        self.candidates = tuple(sorted(candidates, key=_by_number))


def _by_number(path: Path) -> list[tuple[int, str]]:
    """Sort checkpoint-900 before checkpoint-1000."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", str(path))]


@dataclass(frozen=True, slots=True)
class OtherFormat:
    """One kind of checkpoint that is not merged from here.

    Attributes:
        pattern: Matches the names of its files.
        title: What it is, as the rest of a sentence that starts with the folder.
        hint: What can be done with it.
    """

    pattern: re.Pattern[str]
    title: str
    hint: str


# The first that matches a file of the folder names it.
OTHER_FORMATS = (
    OtherFormat(
        re.compile(r"__\d+\.metadata"),
        "has an index per rank (saved with use_collectives=False)",
        "save it with the default use_collectives=True",
    ),
    OtherFormat(
        DATA_FILE, f"has data files but no {INDEX_NAME}: the save did not finish", "use an older checkpoint"
    ),
    OtherFormat(
        re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?"),
        "is merged already",
        "load it as it is",
    ),
    OtherFormat(
        re.compile(r".*rank[-_]?\d+.*\.(pt|pth|bin)"),
        "holds one pickled file per rank",
        "merge it with the tool that wrote it",
    ),
)


def several_models(given: Path, models: list[Path], unfinished: list[Path]) -> LaunchError:
    """Return the error for a folder with several models, or one and the rest of a save that did not finish."""
    if len(models) == 1:
        msg = f"{given} holds {models[0]} and a checkpoint whose save did not finish: {listed_paths(unfinished)}"
        return CheckpointError(msg, hint=f"give {models[0]} itself")
    msg = f"{given} holds {len(models)} models: {listed_paths(models)}"
    return AmbiguousError(msg, models)


def no_model(given: Path, folders: list[tuple[Path, list[str]]], sharded: list[Path]) -> LaunchError:
    """Return the error for a folder without a model, with what it holds instead.

    Args:
        given: What the user pointed at.
        folders: It, and those below it that were looked into, with the names of their files.
        sharded: Those of them that are checkpoints, of optimizers.
    """
    if sharded:
        msg = f"{given} holds only an optimizer: {listed_paths(sharded)}"
        return CheckpointError(msg, hint="the model is saved beside it as pytorch_model_fsdp_0")
    for path, names in folders:
        kind = next((kind for kind in OTHER_FORMATS if any(map(kind.pattern.fullmatch, names))), None)
        if kind is not None:
            msg = f"{path} {kind.title}"
            return CheckpointError(msg, hint=kind.hint)
    here = sorted({*folders[0][1], *(path.relative_to(given).parts[0] + "/" for path, _ in folders[1:])})
    msg = f"{given} holds no sharded checkpoint: no {INDEX_NAME} in it or up to {MAX_DEPTH} folders below"
    return CheckpointError(msg, hint=f"it holds {listed_names(here)}")


def listed_paths(paths: list[Path]) -> str:
    """Return the first of some folders in words, checkpoint-900 before checkpoint-1000."""
    return listed(list(map(str, sorted(paths, key=_by_number))), MAX_LISTED)


def listed_names(names: list[str]) -> str:
    """Return the first of some names in words."""
    return listed(list(map(short, names)), MAX_LISTED) or "nothing"
