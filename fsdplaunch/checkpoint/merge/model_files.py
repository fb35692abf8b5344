"""What stands beside the weights in a model's folder and makes it loadable: configuration, tokenizer, prompts."""

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdplaunch.errors import UsageError

CONFIG_NAME = "config.json"
# What transformers' and sentence-transformers' savers write, apart from weights and training state.
_COMPANION = re.compile(
    r"(config|generation_config|special_tokens_map|added_tokens|vocab|tokenizer\w*|\w*processor_config"
    r"|processor\w*|chat_template\w*)\.json"
    r"|tokenizer\S*|vocab\.\w+|merges\.txt|\w+\.model|\w+\.tiktoken|\w*chat_template\w*\.jinja"
    r"|(configuration|modeling|tokenization|processing|image_processing)_\w+\.py"
)
_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|ckpt|h5|msgpack|gguf|distcp)(\.index\.json)?")


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One file to copy: where it stands, its name in the output, its size in bytes."""

    path: Path
    name: str
    nbytes: int


def find_model_files(folder: Path) -> tuple[ModelFile, ...]:
    """Return the files of a model's folder that belong beside merged weights; never weights.

    Raises:
        UsageError: When it is no folder of a model.
    """
    if not folder.is_dir():
        msg = f"the model folder {folder} is not a folder"
        raise UsageError(msg, hint="give a folder on this machine that holds config.json")
    found = [path for path in sorted(folder.iterdir()) if path.is_file()]
    if not any(path.name == CONFIG_NAME for path in found):
        msg = f"the model folder {folder} holds no {CONFIG_NAME}"
        raise UsageError(
            msg, hint="give the folder that the model was loaded from, or saved to by save_pretrained"
        )
    return tuple(
        ModelFile(path, path.name, path.stat().st_size)
        for path in found
        if _COMPANION.fullmatch(path.name) and not _WEIGHTS.fullmatch(path.name)
    )


def copy_model_files(model_files: Sequence[ModelFile], folder: Path) -> None:
    """Copy the files into `folder`, on disk when this returns; links are followed."""
    for model_file in model_files:
        goal = folder / model_file.name
        shutil.copyfile(model_file.path, goal)
        fd = os.open(goal, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
