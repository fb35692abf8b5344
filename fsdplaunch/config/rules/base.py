"""Contradictions between keys, and keys without effect: what a rule is, and how rules are looked at.

A rule is one small function with a stable id. It looks at a `RuleContext` and yields a `Violation` each time.
Values of single keys are checked by their kinds. What a note rule finds is not an error: the key changes nothing,
and the run is as accelerate and torch would have it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from fsdplaunch.config.resolve import AxisSizes, configured_axes, resolve, uses_xla
from fsdplaunch.config.schema.config import Config, KeyPath, KeySpec, all_keys, keys_by_path, value_at
from fsdplaunch.config.schema.sharding_sections import FsdpConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleContext:
    """What a rule may look at.

    Attributes:
        given: As configured; None where a key is not set.
        config: The same, resolved.
        set_paths: The keys that are set.
    """

    given: Config
    config: Config
    set_paths: frozenset[KeyPath]

    @property
    def fsdp(self) -> FsdpConfig:
        """Return fsdp_config, resolved."""
        return self.config.fsdp_config

    @property
    def version(self) -> int:
        """Return the FSDP version that would run."""
        return self.fsdp.fsdp_version or 2

    @property
    def strategy(self) -> str:
        """Return the sharding strategy, resolved."""
        return self.fsdp.fsdp_sharding_strategy or ""

    @property
    def axes(self) -> AxisSizes:
        """Return the mesh's sizes as configured."""
        return configured_axes(self.config)

    @property
    def shards(self) -> bool:
        """Return whether torch's FSDP is configured at all."""
        return self.config.distributed_type == "FSDP" and not uses_xla(self.config)

    def sets(self, path: KeyPath) -> bool:
        """Return whether a key is set to another value than its default."""
        return path in self.set_paths and value_at(self.given, path) != keys_by_path()[path].default

    def keys_set(self, wanted: Callable[[KeySpec], Any]) -> list[KeySpec]:
        """Return the keys set to another value than their default for which `wanted` holds."""
        return [spec for spec in all_keys() if wanted(spec) and self.sets(spec.path)]


class Violation(NamedTuple):
    """A rule that a configuration breaks, or what a note is about.

    Attributes:
        about: The keys it is about; the first one that is set is where it is reported.
        message: What is wrong, with the value; in a note, what happens instead.
        hint: What to do.
    """

    about: tuple[KeyPath, ...]
    message: str
    hint: str | None = None


Check = Callable[[RuleContext], Iterator[Violation]]
RULES: dict[str, Check] = {}
NOTES: dict[str, Check] = {}
SHARDING_SECTIONS = ("fsdp_config", "sharding", "parallelism_config")
"""Sections that have a meaning only where something is sharded."""
_ALWAYS = {"other-engine", "nothing-sharded", "unused-unit-keys"}
"""Rules that look at how to shard where torch's FSDP does not shard, too; so do those with xla in their name."""


def rule(rule_id: str, table: dict[str, Check] = RULES) -> Callable[[Check], Check]:
    """Register a rule under its stable id."""

    def register(check: Check) -> Check:
        table[rule_id] = check
        return check

    return register


def rule_context(config: Config) -> RuleContext:
    """Return the context of a Config that was built in code: set is what differs from the default."""
    set_paths = frozenset(spec.path for spec in all_keys() if value_at(config, spec.path) != spec.default)
    return RuleContext(given=config, config=resolve(config), set_paths=set_paths)


def fsdp(name: str) -> KeyPath:
    """Return the path of a key of fsdp_config, without its prefix."""
    return ("fsdp_config", f"fsdp_{name}")


def mesh(name: str) -> KeyPath:
    """Return the path of a key of parallelism_config, without its prefix."""
    return ("parallelism_config", f"parallelism_config_{name}_size")


def shown_value(value: Any) -> str:
    """Return a canonical value as a message quotes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def find(rules: Mapping[str, Check], context: RuleContext) -> Iterator[tuple[str, Violation]]:
    """Yield what rules find, with their ids; how to shard is nobody's concern where nothing is sharded."""
    for rule_id, check in rules.items():
        always = context.shards or rule_id in _ALWAYS or "xla" in rule_id
        for violation in check(context):
            if always or violation.about[0][0] not in SHARDING_SECTIONS:
                yield rule_id, violation


def rule_texts(rules: Mapping[str, Check]) -> dict[str, str]:
    """Return every rule's id and what it refuses or notes."""
    return {
        name: (check.__doc__ or "").removeprefix("Refuse ").removeprefix("Name ") for name, check in rules.items()
    }
