"""Contradictions between keys. One small function per rule; every rule has a stable id.

A rule looks at a `RuleContext` and yields a `Violation` each time. Values of keys are checked by their kinds. What
a rule of `NOTES` finds is no error: the key changes nothing, and the run is as accelerate and torch would have it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fsdplaunch.config.resolve import resolve, shards_on_xla, uses_xla
from fsdplaunch.config.schema.config import Config, KeyPath, KeySpec, all_keys, value_at

TorchVersion = Callable[[], tuple[int, int] | None]


def _unknown() -> None:
    """Return None: the run may be for another node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleContext:
    """What a rule may look at.

    Attributes:
        given: As configured; None where a key is not set.
        config: The same, resolved.
        set_paths: The keys that are set.
        torch: Called where it matters, gives major and minor version of the torch that the run will have, or None
            where that cannot be known here.
    """

    given: Config
    config: Config
    set_paths: frozenset[KeyPath]
    torch: TorchVersion = _unknown

    @property
    def version(self) -> int:
        """Return the FSDP version that would run."""
        return self.config.fsdp_config.fsdp_version or 2

    @property
    def shards(self) -> bool:
        """Tell whether torch's FSDP is configured at all."""
        return self.config.distributed_type == "FSDP" and not uses_xla(self.config)

    @property
    def shards_on_xla(self) -> bool:
        """Tell whether PyTorch/XLA shards."""
        return shards_on_xla(self.config)

    def sets(self, spec: KeySpec) -> bool:
        """Tell whether a key is set to another value than its default."""
        return spec.path in self.set_paths and value_at(self.given, spec.path) != spec.default


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
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
_ALWAYS = {"not-supported-yet", "other-engine", "nothing-sharded", "unused-block-names", "unused-block-size"}
"""Rules that look at how to shard where torch's FSDP does not shard, too; so do those with xla in their name."""


def rule(rule_id: str) -> Callable[[Check], Check]:
    """Register a rule under its stable id."""
    return _register(RULES, rule_id)


def note_rule(rule_id: str) -> Callable[[Check], Check]:
    """Register a rule whose violations are notes under its stable id."""
    return _register(NOTES, rule_id)


def _register(table: dict[str, Check], rule_id: str) -> Callable[[Check], Check]:
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


@rule("not-supported-yet")
def _pending(context: RuleContext) -> Iterator[Violation]:
    """Refuse a value of a key that accelerate honours and this cannot, now or ever."""
    for spec in all_keys():
        unread = spec.path[0] == "fsdp_config" and not context.shards
        if spec.key.pending and context.sets(spec) and not unread:
            yield Violation(about=(spec.path,), message=spec.key.pending, hint="remove the key")


@rule("newer-torch")
def _newer_torch(context: RuleContext) -> Iterator[Violation]:
    """Refuse a value that only a newer torch than the installed one can honour; checked where the run starts."""
    for spec in all_keys():
        needed = spec.key.torch_for(value_at(context.given, spec.path)) if spec.key.needs_torch else ""
        if not needed or not context.sets(spec) or context.config.ssh.hosts or context.config.ssh.hostfile:
            continue
        installed = context.torch()
        if installed is not None and installed < tuple(map(int, needed.split("."))):
            here = ".".join(map(str, installed))
            value = shown_value(value_at(context.given, spec.path))
            message = f"{value} needs torch {needed} or newer, and torch {here} is installed"
            hint = f"leave it out, or install torch {needed} or newer"
            yield Violation(about=(spec.path,), message=message, hint=hint)


def shown_value(value: Any) -> str:
    """Return a canonical value as a message quotes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def find_violations(context: RuleContext) -> Iterator[tuple[str, Violation]]:
    """Yield every violation with the id of its rule, in the rules' order."""
    return _find(RULES, context)


def find_notes(context: RuleContext) -> Iterator[tuple[str, Violation]]:
    """Yield what is set and changes nothing of this run, with the id of its rule, in the rules' order."""
    return _find(NOTES, context)


def _find(rules: Mapping[str, Check], context: RuleContext) -> Iterator[tuple[str, Violation]]:
    """Look with all rules; how to shard is nobody's concern where nothing is sharded."""
    for rule_id, check in rules.items():
        always = context.shards or rule_id in _ALWAYS or "xla" in rule_id
        for violation in check(context):
            if always or violation.about[0][0] not in SHARDING_SECTIONS:
                yield rule_id, violation


def all_rules() -> dict[str, str]:
    """Return every rule's id and what it refuses."""
    return _texts(RULES)


def all_notes() -> dict[str, str]:
    """Return the id of every rule that notes something, and what it notes."""
    return _texts(NOTES)


def _texts(rules: Mapping[str, Check]) -> dict[str, str]:
    """Return the docstrings by id, without their verb."""
    texts = {rule_id: check.__doc__ or "" for rule_id, check in rules.items()}
    return {rule_id: text.removeprefix("Refuse ").removeprefix("Name ") for rule_id, text in texts.items()}
