"""Print what was sharded: one line per model, and one line for several small ones."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from fsdplaunch.runtime import messages
from fsdplaunch.runtime.inspection.describe import ShardingDescription
from fsdplaunch.runtime.inspection.parameter_names import count

_SMALL = 10_000_000
"""Parameters up to which models share a line, if there are several."""

_about: list[str | None] = []
_waiting: list[tuple[ShardingDescription, str]] = []
_waits: list[bool] = []


@contextmanager
def announcing(about: str | None) -> Iterator[None]:
    """Add to the lines of models that are sharded inside for whom it is done; None prints nothing of them."""
    _about.append(about)
    try:
        yield
    finally:
        _about.pop()


def announce(description: ShardingDescription, about: str | None = None) -> None:
    """Print how a model is sharded, or remember it until `print_waiting`."""
    if about is None and _about:
        about = _about[-1]
        if about is None:
            return
    _waiting.append((description, about or ""))
    if not _waits:
        print_waiting()


def wait_for_others() -> None:
    """Print nothing from now on until `print_waiting`, so that several models can share a line."""
    _waits.append(True)


def print_waiting() -> None:
    """Print what was remembered."""
    waiting, _waiting[:] = list(_waiting), []
    alike = {(each.version, each.strategy, tuple(each.mesh.items()), *sorted(each.kept)) for each, _ in waiting}
    if len(waiting) > 1 and len(alike) == 1 and all(each.parameters <= _SMALL for each, _ in waiting):
        first, about = waiting[0]
        kinds = ", ".join(
            f"{n} x {kind}" if n > 1 else kind for kind, n in Counter(e.model for e, _ in waiting).items()
        )
        size = count(sum(each.parameters for each, _ in waiting))
        messages.say(f"sharded {len(waiting)} models: {kinds}, {size} parameters, {first.layout()}{_ended(about)}")
        return
    for each, about in waiting:
        messages.say(each.line() + _ended(about))


def _ended(about: str) -> str:
    return about and f", {about}"
