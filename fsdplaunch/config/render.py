"""The text of a new file: what differs from the default, what must be pinned, comments; and the presets."""

import os
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsdplaunch
from fsdplaunch import __version__
from fsdplaunch.config.names import closest
from fsdplaunch.config.resolve import is_read_by_xla, resolve, shards_models, shards_on_xla
from fsdplaunch.config.schema.config import (
    Config,
    KeyPath,
    KeySpec,
    all_keys,
    build_config,
    keys_by_path,
    section_classes,
    value_at,
)
from fsdplaunch.config.yaml_text import block_lines, plain_value
from fsdplaunch.errors import LaunchError, UsageError
from fsdplaunch.files import atomic_file

SCHEMA_FILE = "fsdp.schema.json"
MODELINE = f"# yaml-language-server: $schema={SCHEMA_FILE}"
_WIDTH = 100


_EDITORS = "# for editors, makes that file: fsdplaunch config schema > fsdp.schema.json"


def render(config: Config, *, full: bool = False, comments: bool = True) -> str:
    """Return the text of a file that gives `config` again.

    Args:
        config: What the file must hold.
        full: Every key that has a value, instead of what differs from the default.
        comments: One comment per key and section.
    """
    resolved = resolve(config)
    values = _everything(resolved) if full else values_to_write(resolved)
    head = [MODELINE, _EDITORS, f"# fsdplaunch {__version__}; every key: fsdplaunch config explain", ""]
    head = head if comments else []
    return "\n".join([*head, *render_values(values, comments=comments)]) + "\n"


def values_to_write(config: Config) -> dict[KeyPath, Any]:
    """Return the values a file must say so that reading it gives the resolved `config`, in the schema's order."""
    written = {
        spec.path: value_at(config, spec.path)
        for spec in all_keys()
        if (spec.default is not None and value_at(config, spec.path) != spec.default) or _pinned(config, spec)
    }
    while (missing := _missing(config, written)) is not None:
        written[missing] = value_at(config, missing)
    return {spec.path: written[spec.path] for spec in all_keys() if spec.path in written}


def _pinned(config: Config, spec: KeySpec) -> bool:
    has_value = value_at(config, spec.path) is not None and not _idle(config, spec)
    is_read = is_read_by_xla(spec.path) or not shards_on_xla(config)
    return config.fsdp_config.fsdp_version in spec.key.pinned and has_value and is_read


def _idle(config: Config, spec: KeySpec) -> bool:
    """Tell whether a key says how to shard where nothing is sharded."""
    shards_nothing = not shards_models(config) and not spec.key.leftover
    return shards_nothing and spec.path[0] in ("fsdp_config", "parallelism_config")


def _missing(config: Config, written: dict[KeyPath, Any]) -> KeyPath | None:
    """Return the first key that would not come out as it is in `config` unless the file says it."""
    read = resolve(build_config(written))
    for spec in sorted(
        all_keys(), key=lambda spec: _idle(config, spec)
    ):  # what shards nothing is written last, if at all
        value = value_at(config, spec.path)
        if value is not None and spec.path not in written and value_at(read, spec.path) != value:
            return spec.path
    return None


def _everything(config: Config) -> dict[KeyPath, Any]:
    version = config.fsdp_config.fsdp_version
    return {
        spec.path: value
        for spec in all_keys()
        if (value := value_at(config, spec.path)) is not None
        and not _idle(config, spec)
        and (value != spec.default or not (spec.key.unread or version not in spec.key.versions))
    }


def render_values(values: Mapping[KeyPath, Any], *, comments: bool = True) -> Iterator[str]:
    """Yield the lines that say `values`, which must come section by section."""
    section = ""
    for path, value in values.items():
        home = path[0] if len(path) > 1 else ""
        if home != section:
            section = home
            yield from _section_lines(home, comments=comments)
        indent = 2 if home else 0
        spec = keys_by_path()[path]
        if comments:
            yield from _comment(spec.key.summary, indent)
        yield from block_lines(spec.name, plain_value(spec, value), indent)


def _section_lines(section: str, *, comments: bool) -> Iterator[str]:
    if comments:
        yield ""
        doc = section_classes()[section].__doc__ or ""
        yield from _comment(doc.split(". ")[0].rstrip("."), 0)
    yield f"{section}:"


def _comment(text: str, indent: int) -> list[str]:
    lead = " " * indent + "# "
    return textwrap.wrap(text, _WIDTH, initial_indent=lead, subsequent_indent=lead)


def key_lines(spec: KeySpec, value: Any, indent: int) -> list[str]:
    """Return the lines of one key as `render` writes them, without a comment."""
    return block_lines(spec.name, plain_value(spec, value), indent)


def write_text_atomically(path: Path, text: str) -> None:
    """Put `text` into a file, whole or not at all. A link is followed, permissions of an old file are kept.

    Raises:
        LaunchError: The folder is missing, full or not writable.
    """
    target = Path(os.path.realpath(path))
    try:
        with atomic_file(target) as temporary:
            with temporary.open("x", encoding="utf-8", newline="") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            with suppress(FileNotFoundError):
                temporary.chmod(target.stat().st_mode & 0o7777)
    except OSError as error:
        msg = f"cannot write {path}: {(error.strerror or 'unknown reason').lower()}"
        raise LaunchError(msg, hint="name another file in a folder that can be written to") from error


_PACKAGE = Path(fsdplaunch.__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One file of configs/.

    Attributes:
        name: The file's name without its ending.
        summary: What its first comment says.
        text: The file.
    """

    name: str
    summary: str
    text: str


def preset_folder() -> Path:
    """Return the folder with the presets: inside the wheel, else beside the package."""
    shipped = _PACKAGE / "_presets"
    return shipped if shipped.is_dir() else _PACKAGE.parent / "configs"


def list_presets() -> tuple[Preset, ...]:
    """Return every preset, by name."""
    return tuple(_read(path) for path in sorted(preset_folder().glob("*.yaml")))


def find_preset(name: str) -> Preset:
    """Return one preset.

    Raises:
        UsageError: There is none of that name.
    """
    presets = {preset.name: preset for preset in list_presets()}
    wanted = name.removesuffix(".yaml").replace("-", "_")
    if wanted in presets:
        return presets[wanted]
    near = closest(wanted, list(presets))
    msg = f"{name} is not a preset"
    raise UsageError(msg, hint=f"did you mean {near[0]}?" if near else f"there are {', '.join(presets)}")


def _read(path: Path) -> Preset:
    text = path.read_text(encoding="utf-8")
    comments = [line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("# ")]
    summary = next((line for line in comments if not line.startswith("yaml-language-server")), "")
    return Preset(name=path.stem, summary=summary, text=text)
