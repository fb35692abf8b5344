"""Which weights a user asks for, and under which names: `--only`, `--exclude` and `--rename`.

A pattern with `*`, `?` or `[` is a shell pattern for the whole name; any other is a name or its leading parts
(`model.layers.1` is not `model.layers.10`).
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from fsdplaunch.checkpoint.invalid_file import short
from fsdplaunch.errors import UsageError

_WILD = set("*?[")


def matches(name: str, pattern: str) -> bool:
    """Say whether a weight's name fits a pattern."""
    if _WILD & set(pattern):
        return fnmatchcase(name, pattern)
    return starts_with(name, pattern)


def starts_with(name: str, prefix: str) -> bool:
    """Say whether `prefix` is `name` or its leading dotted parts."""
    parts = prefix.removesuffix(".")
    return name == parts or name.startswith(parts + ".")


def pick(names: Sequence[str], *, only: Sequence[str] = (), exclude: Sequence[str] = ()) -> list[bool]:
    """Return which of `names` are merged: those of `only` (all when it is empty) without those of `exclude`.

    Raises:
        UsageError: When a pattern fits no name, or nothing is left.
    """
    for option, patterns in (("--only", only), ("--exclude", exclude)):
        for pattern in patterns:
            if not any(matches(name, pattern) for name in names):
                option_text = f"{option} {pattern!r}"
                raise _no_match(option_text, names)
    wanted = [
        (not only or any(matches(name, pattern) for pattern in only))
        and not any(matches(name, pattern) for pattern in exclude)
        for name in names
    ]
    if not any(wanted):
        msg = f"--only and --exclude leave none of the {len(names)} weights"
        raise UsageError(msg, hint="exclude less")
    return wanted


def rename(names: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Return `names` with the leading parts OLD replaced by NEW; the first pair that fits a name counts.

    An empty OLD puts NEW in front of every name, an empty NEW takes OLD away.

    Raises:
        UsageError: When an OLD fits no name, or nothing would be left of one.
    """
    used: set[int] = set()
    result = []
    for name in names:
        found = next((at for at, (old, _) in enumerate(pairs) if not old or starts_with(name, old)), None)
        if found is None:
            result.append(name)
            continue
        used.add(found)
        result.append(_replaced(name, *pairs[found]))
    for at, (old, new) in enumerate(pairs):
        if at not in used:
            option_text = f"--rename {old}={new}"
            raise _no_match(option_text, names)
    return result


def _replaced(name: str, old: str, new: str) -> str:
    rest = name[len(old.removesuffix(".")) :].removeprefix(".") if old else name
    changed = ".".join(part for part in (new.removesuffix("."), rest) if part)
    if not changed:
        msg = f"--rename {old}={new} leaves nothing of the name {short(name)}"
        raise UsageError(msg, hint="give a NEW that is not empty")
    return changed


def _no_match(option: str, names: Sequence[str]) -> UsageError:
    shown = ", ".join(short(name) for name in names[:3]) + (", ..." if len(names) > 3 else "")  # noqa: PLR2004
    return UsageError(
        f"{option} fits none of the {len(names)} weights",
        hint=f"names are {shown}; without * it takes leading parts",
    )
