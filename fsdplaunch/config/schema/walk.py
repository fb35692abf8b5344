"""Walk the schema: one `KeySpec` per key in the schema's order, and a Config from plain values."""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from keyword import iskeyword
from typing import Any

from fsdplaunch.config.schema.config import Config
from fsdplaunch.config.schema.key import Key

Path = tuple[str, ...]
_ACCELERATE_PREFIXES = {
    "fsdp_config": "",
    "parallelism_config": "",
    "fp8_config": "ACCELERATE_FP8_",
    "dynamo_config": "ACCELERATE_",
}
"""What stands before a key's name in the variables that accelerate reads for a section."""


@dataclass(frozen=True, slots=True)
class KeySpec:
    """One configuration key, with everything the schema says about it.

    Attributes:
        path: Where it stands, for example `("fsdp_config", "fsdp_version")`.
        key: The schema's remarks: kind, text, environment variable, versions.
        default: The value when nothing says otherwise. None: decided from the rest of the file.
    """

    path: Path
    key: Key
    default: Any

    @property
    def name(self) -> str:
        """Return the last part of the path."""
        return self.path[-1]

    @property
    def dotted(self) -> str:
        """Return the whole path, `section.key`."""
        return ".".join(self.path)

    @property
    def env(self) -> str:
        """Return the environment variable that carries the key."""
        prefix = _ACCELERATE_PREFIXES.get(self.path[0])
        derived = "FSDPLAUNCH_" + "_".join(self.path) if prefix is None else prefix + self.name
        return self.key.env or derived.upper()


def _section(entry: Field[Any]) -> type | None:
    """Return the class of a section, or None when the field is a key."""
    factory = entry.default_factory
    return factory if isinstance(factory, type) and is_dataclass(factory) else None


def field_name(name: str) -> str:
    """Return the attribute that holds the key `name`: the name itself, but `async_` for `async`."""
    return f"{name}_" if iskeyword(name) else name


def _walk(model: Any, path: Path) -> Iterator[KeySpec]:
    for entry in fields(model):
        section = _section(entry)
        if section is not None:
            yield from _walk(section, (*path, entry.name))
        else:
            default = entry.default if entry.default_factory is MISSING else entry.default_factory()
            yield KeySpec((*path, entry.name.removesuffix("_")), entry.metadata["key"], default)


@cache
def all_keys() -> tuple[KeySpec, ...]:
    """Return every key of the schema."""
    return tuple(_walk(Config, ()))


@cache
def keys_by_path() -> dict[Path, KeySpec]:
    """Return every key, by where it stands."""
    return {spec.path: spec for spec in all_keys()}


@cache
def section_classes() -> dict[str, type]:
    """Return the class of every section, by its name in the file."""
    return {entry.name: section for entry in fields(Config) if (section := _section(entry)) is not None}


def own_sections() -> tuple[str, ...]:
    """Return the sections that accelerate does not have and refuses; the names of its own end in `_config`."""
    return tuple(name for name in section_classes() if not name.endswith("_config"))


def variable_of(dotted: str) -> str:
    """Return the environment variable that carries a key, for example `launch.log_dir`."""
    return keys_by_path()[tuple(dotted.split("."))].env


def value_at(config: Any, path: Path) -> Any:
    """Return the value of the key at `path`."""
    for part in path:
        config = getattr(config, field_name(part))
    return config


def build_config(values: Mapping[Path, Any]) -> Config:
    """Make a Config of canonical values; keys not named keep their default.

    Args:
        values: Canonical values (as `Kind.parse` returns them) by path.
    """
    sections: dict[str, dict[str, Any]] = {name: {} for name in section_classes()}
    top: dict[str, Any] = {}
    for path, value in values.items():
        place = top if len(path) == 1 else sections[path[0]]
        place[field_name(path[-1])] = value
    built = {name: cls(**sections[name]) for name, cls in section_classes().items()}
    return Config(**top, **built)
