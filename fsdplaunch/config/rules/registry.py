"""Every rule, in the order in which they are looked at, and what a configuration violates."""

from collections.abc import Iterator

from fsdplaunch.config.rules import compute, launch_rules, sharding  # noqa: F401  (they register rules)
from fsdplaunch.config.rules.base import RULES, RuleContext, Violation


def find_violations(context: RuleContext) -> Iterator[tuple[str, Violation]]:
    """Yield every violation with the id of its rule, in the rules' order."""
    for rule_id, check in RULES.items():
        for violation in check(context):
            yield rule_id, violation


def all_rules() -> dict[str, str]:
    """Return every rule's id and what it refuses."""
    return {rule_id: check.__doc__ or "" for rule_id, check in RULES.items()}
