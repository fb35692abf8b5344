"""Contradictions between keys, and keys without effect: what a rule is, and how rules are looked at.

A rule is one small function with a stable id. It looks at a `RuleContext` and yields a `Violation` each time.
Values of single keys are checked by their kinds. What a note rule finds is not an error: the key changes nothing,
and the run is as accelerate and torch would have it.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from fsdplaunch.config.resolve import configured_axes, resolve, uses_xla
from fsdplaunch.config.schema.config import Config, KeyPath, KeySpec, all_keys, keys_by_path, value_at


class RuleContext:
    """What a rule may look at: a Config as configured, None where a key is not set, and which keys are set."""

    def __init__(self, given: Config, set_paths: frozenset[KeyPath]) -> None:
        self.given, self.set_paths, self.config = given, set_paths, resolve(given)
        self.fsdp = self.config.fsdp_config  # resolved
        self.version = self.fsdp.fsdp_version or 2  # the one that would run
        self.strategy = self.fsdp.fsdp_sharding_strategy or ""
        self.axes = configured_axes(self.config)
        self.shards = self.config.distributed_type == "FSDP" and not uses_xla(self.config)  # torch's FSDP

    def sets(self, path: KeyPath) -> bool:
        """Return whether a key is set to another value than its default."""
        return path in self.set_paths and value_at(self.given, path) != keys_by_path()[path].default

    def keys_set(self, wanted: Callable[[KeySpec], Any]) -> list[KeySpec]:
        """Return the keys set to another value than their default for which `wanted` holds."""
        return [spec for spec in all_keys() if wanted(spec) and self.sets(spec.path)]


class Violation(NamedTuple):
    """A rule that a configuration breaks, or what a note is about."""

    about: tuple[KeyPath, ...]  # the keys it is about; the first one that is set is where it is reported
    message: str  # what is wrong, with the value; in a note, what happens instead
    hint: str | None = None  # what to do


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
    return RuleContext(config, set_paths)


def fsdp(name: str) -> KeyPath:
    """Return the path of a key of fsdp_config, without its prefix."""
    return ("fsdp_config", f"fsdp_{name}")


def mesh(name: str) -> KeyPath:
    """Return the path of a key of parallelism_config, without its prefix."""
    return ("parallelism_config", f"parallelism_config_{name}_size")


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
