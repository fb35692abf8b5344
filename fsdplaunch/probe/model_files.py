"""Find a model, here or on the Hugging Face hub, and read its size from headers: weights are never fetched."""

import json
import logging
import os
import re
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from fsdplaunch.checkpoint.model_weights import find_weight_files
from fsdplaunch.errors import CheckpointError, UsageError
from fsdplaunch.private_dir import make_process_dir

FEWEST_PARAMETERS = 1_000_000
"""A smaller model is a size whose unit was forgotten: 8 is not a model of 8 parameters."""
_LETTERS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def parse_count(text: str) -> int:
    """Read a parameter count as people write it: 8b, 8.03 B, 124M, 1_000_000; a ValueError for anything else."""
    match = re.fullmatch(r"([0-9][0-9_]{0,40}(?:\.[0-9]{1,40})?)\s*([kmbt]?)", text.strip().lower())
    number = round(float(match[1]) * _LETTERS[match[2]]) if match else 0
    if number < 1:
        raise ValueError(text)
    return number


def find_model(folder: Path) -> Path | None:
    """Return the folder just below `folder` whose weights changed last, or None."""
    found = [path for path in folder.glob("*/*.safetensors") if path.is_file()]
    newest = max(found, key=lambda path: path.stat().st_mtime, default=None)
    return newest.parent if newest else None


_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PATIENCE_SECONDS = 10
_REASONS = {
    "GatedRepoError": "it is gated; agree to its terms on the hub, then run hf auth login",
    "RepositoryNotFoundError": "the hub knows no such model, or it is private; run hf auth login",
    "EntryNotFoundError": "it has no config.json",
    "NotASafetensorsRepoError": "it has no safetensors files, whose headers say its size",
}
"""What errors of huggingface_hub mean, by the name of their class."""


def is_hub_name(text: str) -> bool:
    """Return whether a text names a model on the hub, `org/model`, and nothing on this machine."""
    return bool(_NAME.fullmatch(text)) and not Path(text).exists()


@cache
def hub_folder(name: str) -> Path:
    """Return a folder that describes a model of the hub, `org/model`: its config.json and its weights' headers."""
    return _cached(name) or _fetched(name)


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder where huggingface_hub keeps what it has fetched."""
    if hub := environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(hub).expanduser()
    base = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(environ.get("HF_HOME") or f"{base}/huggingface").expanduser() / "hub"


def _cached(name: str) -> Path | None:
    """Return the cached snapshot of the main branch, else the newest, that has configuration and all weights."""
    home = cache_folder(os.environ) / f"models--{name.replace('/', '--')}"
    main = home / "refs" / "main"
    named = [home / "snapshots" / main.read_text(encoding="utf-8").strip()] if main.is_file() else []
    others = sorted(home.glob("snapshots/*"), key=lambda path: path.stat().st_mtime, reverse=True)
    return next((path for path in (*named, *others) if _is_complete(path)), None)


def _is_complete(folder: Path) -> bool:
    try:
        return (folder / "config.json").is_file() and bool(find_weight_files(folder).weights)
    except CheckpointError:
        return False  # a weight file is not there


def _fetched(name: str) -> Path:
    """Fetch the configuration and the weights' headers, into files without data as large as the real ones."""
    if find_spec("huggingface_hub") is None:
        raise _unreachable(name, "huggingface_hub, which would download it, is not installed")
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "on", "true", "yes"):
        raise _unreachable(name, "HF_HUB_OFFLINE forbids downloading it")
    import huggingface_hub

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        # First anything, once: its client asks a host that is not there for half a minute.
        huggingface_hub.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=_PATIENCE_SECONDS)
        config = Path(huggingface_hub.hf_hub_download(name, "config.json"))
        headers = huggingface_hub.get_safetensors_metadata(name)
    except Exception as error:
        known = [_REASONS[each.__name__] for each in type(error).__mro__ if each.__name__ in _REASONS]
        lines = [line[:200] for line in str(error).strip().splitlines()]
        why = next(iter([*known, *lines]), type(error).__name__)
        raise _unreachable(name, f"it cannot be downloaded: {why}") from None
    folder = make_process_dir()
    (folder / "config.json").write_bytes(config.read_bytes())
    for file_name, found in headers.files_metadata.items():
        entries = {
            name: {"dtype": str(one.dtype), "shape": list(one.shape), "data_offsets": list(one.data_offsets)}
            for name, one in found.tensors.items()
        }
        text = json.dumps(entries).encode()
        end = max((one.data_offsets[1] for one in found.tensors.values()), default=0)
        with (folder / Path(file_name).name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
    return folder


def _unreachable(name: str, why: str) -> UsageError:
    hint = "give a folder, or a size such as 8b"
    return UsageError(f"{name} is neither a folder nor in the hub's cache on this machine, and {why}", hint=hint)
