"""Models by their name on the Hugging Face hub: from this machine's cache, else configuration and headers fetched.

Weights are never fetched. Of the weight files' headers, files of the same size without data are made in a
temporary folder, so that whatever reads a model folder reads them too.
"""

import json
import logging
import os
import re
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fsdplaunch.errors import UsageError
from fsdplaunch.private_dir import make_process_dir

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PATIENCE_SECONDS = 10
_REASONS = {
    "GatedRepoError": "the hub gives it only to those who have agreed to its terms; run hf auth login",
    "RepositoryNotFoundError": "the hub knows no such model, or it is private; run hf auth login",
    "EntryNotFoundError": "it has no config.json",
    "NotASafetensorsRepoError": "it has no safetensors files, whose headers tell its size",
}
"""What errors of huggingface_hub mean, by the name of their class."""
_OFF = frozenset({"1", "on", "true", "yes"})


def is_hub_name(text: str) -> bool:
    """Tell whether a text names a model on the hub, `org/model`, and nothing on this machine."""
    return bool(_NAME.fullmatch(text)) and not Path(text).exists()


@cache
def hub_folder(name: str) -> Path:
    """Return a folder that describes a model of the hub: its config.json and the headers of its weights.

    Args:
        name: `org/model`.

    Raises:
        UsageError: It is not in the cache, and cannot be fetched.
    """
    return _cached(name, os.environ) or _fetched(name)


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder where huggingface_hub keeps what it has fetched."""
    if hub := environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(hub).expanduser()
    base = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(environ.get("HF_HOME") or f"{base}/huggingface").expanduser() / "hub"


def _cached(name: str, environ: Mapping[str, str]) -> Path | None:
    """Return the cached snapshot of the main branch, else the newest, that has configuration and all weights."""
    home = cache_folder(environ) / f"models--{name.replace('/', '--')}"
    main = home / "refs" / "main"
    named = [home / "snapshots" / main.read_text(encoding="utf-8").strip()] if main.is_file() else []
    others = sorted(home.glob("snapshots/*"), key=lambda path: path.stat().st_mtime, reverse=True)
    return next((path for path in (*named, *others) if _is_complete(path)), None)


def _is_complete(folder: Path) -> bool:
    from fsdplaunch.probe.model_folder import weight_files

    try:
        return (folder / "config.json").is_file() and bool(weight_files(folder))
    except UsageError:
        return False  # a weight file is not there


def _fetched(name: str) -> Path:
    """Fetch the configuration and the weights' headers.

    Raises:
        UsageError: huggingface_hub is missing, offline, or finds no such model.
    """
    if find_spec("huggingface_hub") is None:
        raise _unreachable(name, "huggingface_hub is not installed to fetch it")
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in _OFF:
        raise _unreachable(name, "HF_HUB_OFFLINE forbids to fetch it")
    import huggingface_hub

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        _reach_hub(huggingface_hub)
        config = Path(huggingface_hub.hf_hub_download(name, "config.json"))
        headers = huggingface_hub.get_safetensors_metadata(name)
    except Exception as error:
        raise _unreachable(name, f"it cannot be fetched: {_reason(error)}") from None
    folder = make_process_dir()
    (folder / "config.json").write_bytes(config.read_bytes())
    for file_name, found in headers.files_metadata.items():
        _write_header(folder / Path(file_name).name, found.tensors)
    return folder


def _reach_hub(client: Any) -> None:
    """Ask the hub for anything, once: its client asks a host that is not there for half a minute.

    Args:
        client: The module huggingface_hub.
    """
    client.get_session().head(client.constants.ENDPOINT, timeout=_PATIENCE_SECONDS)


def _reason(error: Exception) -> str:
    """Return why the hub's client failed, in one line."""
    known = next((_REASONS[each.__name__] for each in type(error).__mro__ if each.__name__ in _REASONS), None)
    lines = str(error).strip().splitlines()
    return known or (lines[0][:200] if lines else type(error).__name__)


def _unreachable(name: str, why: str) -> UsageError:
    hint = "give a folder, or a size such as 8b"
    return UsageError(f"{name} is no folder and not in the hub's cache on this machine, and {why}", hint=hint)


def _write_header(path: Path, tensors: Mapping[str, Any]) -> None:
    """Make a safetensors file with a header and without data, as large as the real one."""
    entries = {
        name: {"dtype": str(one.dtype), "shape": list(one.shape), "data_offsets": list(one.data_offsets)}
        for name, one in tensors.items()
    }
    text = json.dumps(entries).encode()
    end = max((one["data_offsets"][1] for one in entries.values()), default=0)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
