"""What a model folder holds: parameters, dtypes, repeated blocks, read from the headers of its safetensors files.

A header is 8 bytes of length and that much JSON, so an 800 GB model is described in milliseconds and nothing in
the folder is ever executed. Folders with pickled weights only (`.bin`) tell their size and no more.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fsdplaunch.byte_sizes import size_words
from fsdplaunch.checkpoint.invalid_file import InvalidFileError
from fsdplaunch.checkpoint.manifest import read_json
from fsdplaunch.checkpoint.safetensors_format import INDEX_NAME, FileHeader, read_header, read_weight_map
from fsdplaunch.errors import UsageError
from fsdplaunch.probe.repeated_blocks import RepeatedBlocks, find_blocks

_LETTERS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_NAMES = {"F32": "fp32", "BF16": "bf16", "F16": "fp16", "F64": "fp64", "F8_E4M3": "fp8", "F8_E5M2": "fp8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model on disk, or a given size.

    Attributes:
        folder: Where it lies; None for a size that was only named.
        parameters: Number of parameters, buffers that were saved included; None where only a size is known.
        size_bytes: Bytes of the weight files.
        dtypes: Parameters per dtype, most first.
        blocks: The repeated blocks, largest share first.
        unit: Parameters of the largest block, or of everything when nothing is repeated.
        outside: Parameters in no repeated block: embeddings, head, last norm.
        architecture: The model's class, from config.json.
    """

    folder: Path | None = None
    parameters: int | None = None
    size_bytes: int = 0
    dtypes: Mapping[str, int] = field(default_factory=dict)
    blocks: tuple[RepeatedBlocks, ...] = ()
    unit: int = 0
    outside: int = 0
    architecture: str | None = None

    @property
    def dtype(self) -> str | None:
        """Return the dtype most parameters are in: fp32, bf16, fp16, ..., or None."""
        return next(iter(self.dtypes), None)


def read_model(folder: Path) -> ModelFacts:
    """Describe the model in a folder.

    Args:
        folder: Holds `*.safetensors` (with or without an index) or `*.bin` files.

    Raises:
        UsageError: There is no such folder, it holds no weights, or a header cannot be read.
    """
    if not folder.is_dir():
        msg = f"model folder {folder} does not exist"
        raise UsageError(msg, hint="give the folder that holds config.json")
    architecture = _architecture(folder)
    files = weight_files(folder)
    if not files:
        pickled = sorted(folder.glob("*.bin"))
        if not pickled:
            msg = f"{folder} holds no *.safetensors and no *.bin file"
            raise UsageError(msg)
        return ModelFacts(folder=folder, size_bytes=_size(pickled), architecture=architecture)
    return _describe(folder, files, architecture)


def sized_model(parameters: int) -> ModelFacts:
    """Return facts for a model of which only the size is known, with the blocks of a usual transformer.

    Args:
        parameters: Number of parameters.
    """
    # A block of a decoder is 12 width^2 parameters and models have about width / 128 blocks (Llama, GPT, Qwen).
    width = (parameters * 128 / 12) ** (1 / 3)
    return ModelFacts(parameters=parameters, unit=min(parameters, round(12 * width * width)))


def describe_model(model: ModelFacts) -> str:
    """Return one line: parameters, dtype, blocks.

    Args:
        model: What was found.
    """
    words = [str(model.folder)] if model.folder else []
    if model.parameters is None:
        return "   ".join([*words, f"{size_words(model.size_bytes)} of pickled weights, not looked into"])
    facts = [f"{short_count(model.parameters)} parameters", *([model.dtype] if model.dtype else [])]
    facts += [f"{group.count} repeated blocks ({group.prefix}.*)" for group in model.blocks[:2]]
    return "   ".join([*words, ", ".join(facts)])


def short_count(number: int) -> str:
    """Return a parameter count as people write it: 8.03 B, 124 M.

    Args:
        number: How many.
    """
    for limit, letter in ((1_000_000_000, "B"), (1_000_000, "M"), (1_000, "K")):
        if number >= limit:
            return f"{number / limit:.3g} {letter}"
    return str(number)


def parse_count(text: str) -> int:
    """Read a parameter count as people write it: 8b, 8.03 B, 124M, 1_000_000.

    Args:
        text: The count.

    Raises:
        ValueError: It is none, or less than 1.
    """
    match = re.fullmatch(r"([0-9][0-9_]{0,40}(?:\.[0-9]{1,40})?)\s*([kmbt]?)", text.strip().lower())
    number = round(float(match[1]) * _LETTERS[match[2]]) if match else 0
    if number < 1:
        raise ValueError(text)
    return number


def find_model(folder: Path) -> Path | None:
    """Return the folder just below `folder` whose weights changed last, or None.

    Args:
        folder: Usually the working directory.
    """
    found = [path for path in folder.glob("*/*.safetensors") if path.is_file()]
    newest = max(found, key=lambda path: path.stat().st_mtime, default=None)
    return newest.parent if newest else None


def _describe(folder: Path, files: list[Path], architecture: str | None) -> ModelFacts:
    counts: dict[str, int] = {}
    dtypes: Counter[str] = Counter()
    for path in files:
        for name, entry in file_header(path).entries.items():
            counts[name] = math.prod(entry.shape)
            dtypes[_NAMES.get(entry.code, entry.code.lower())] += counts[name]
    blocks = find_blocks(counts)
    total = sum(counts.values())
    return ModelFacts(
        folder=folder,
        parameters=total,
        size_bytes=_size(files),
        dtypes=dict(dtypes.most_common()),
        blocks=blocks,
        unit=max((group.parameters_each for group in blocks), default=total),
        outside=total - sum(group.parameters for group in blocks),
        architecture=architecture,
    )


def file_header(path: Path) -> FileHeader:
    """Return the header of a safetensors file.

    Args:
        path: The file.

    Raises:
        UsageError: It is cut short or no safetensors file.
    """
    try:
        return read_header(path)
    except (OSError, InvalidFileError) as error:
        msg = f"{path} is no complete safetensors file: {error}"
        raise UsageError(msg, hint="download or copy it again") from None


def read_index(folder: Path) -> dict[str, str]:
    """Return which file holds which tensor, as the folder's index says; empty where there is no index.

    Args:
        folder: The model's folder.
    """
    try:
        listed = read_weight_map(folder / INDEX_NAME)
    except InvalidFileError:
        return {}
    files = {file: Path(file).name for file in set(listed.values())}
    return {name: files[file] for name, file in listed.items()}


def weight_files(folder: Path) -> list[Path]:
    """Return the files the index names, or every safetensors file.

    Args:
        folder: The model's folder.

    Raises:
        UsageError: A file that the index names is not there.
    """
    listed = read_index(folder)
    if not listed:
        return sorted(folder.glob("*.safetensors"))
    names = sorted(set(listed.values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise UsageError(
            f"{folder / INDEX_NAME} names {missing[0]}, which is not there"
            + (f", nor are {len(missing) - 1} more" if len(missing) > 1 else ""),
            hint="finish the download, or give another folder",
        )
    return [folder / name for name in names]


def _architecture(folder: Path) -> str | None:
    config = read_json(folder / "config.json")
    named = config.get("architectures") if isinstance(config, dict) else None
    return named[0] if isinstance(named, list) and named and isinstance(named[0], str) else None


def _size(files: list[Path]) -> int:
    return sum(path.stat().st_size for path in files)
