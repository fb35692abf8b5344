"""A candidate: the user's configuration with some keys changed, and its short name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fsdplaunch.config.rules.base import shown_value
from fsdplaunch.config.schema.walk import Path, all_keys, keys_by_path

_PREFIXES = ("fsdp_", "parallelism_config_", "dynamo_")


@dataclass(frozen=True, slots=True)
class Candidate:
    """Some changes to the user's configuration; none for that itself.

    Attributes:
        changes: Keys and their canonical values, in the schema's order.
    """

    changes: tuple[tuple[Path, Any], ...] = ()

    @property
    def is_yours(self) -> bool:
        """Return whether nothing is changed."""
        return not self.changes

    @property
    def label(self) -> str:
        """Return a short name, without what another key implies: `forward_prefetch=true, checkpoint_every=2`."""
        specs = [keys_by_path()[path] for path, _ in self.changes]
        implied = {name for spec in specs if spec.key.tunable for name in spec.key.tunable.needs}
        shown = [(path, value) for path, value in self.changes if ".".join(path) not in implied]
        words = [f"{short_name(path)}={shown_value(value)}" for path, value in shown]
        return ", ".join(words) or "yours"

    @property
    def overrides(self) -> list[str]:
        """Return the changes as `KEY=VALUE` texts; what says the same in other words is taken back before."""
        specs = [(keys_by_path()[path], value) for path, value in self.changes]
        follow = [name for spec, _ in specs if spec.key.tunable for name in spec.key.tunable.follow]
        return [
            *(f"{name}=" for name in follow),
            *(f"{spec.dotted}={spec.key.kind.write(value)}" for spec, value in specs),
        ]

    def with_changes(self, other: "Candidate") -> "Candidate":
        """Return the changes of both; of a key that both change, the other's."""
        return candidate_of({**dict(self.changes), **dict(other.changes)})

    def to_dict(self) -> dict[str, Any]:
        """Return the changes as plain data, by dotted key."""
        return {".".join(path): value for path, value in self.changes}


def candidate_of(changes: Mapping[Path, Any]) -> Candidate:
    """Return the candidate with these changes."""
    return Candidate(tuple((spec.path, changes[spec.path]) for spec in all_keys() if spec.path in changes))


def short_name(path: Path) -> str:
    """Return a key's name without what accelerate puts before the names of a section."""
    name = path[-1]
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name
