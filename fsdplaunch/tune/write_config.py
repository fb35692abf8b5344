"""The winner as a configuration file: the user's own, and at each changed key what it gained. Pure."""

from collections.abc import Iterator, Sequence

from fsdplaunch.config.schema.config import Config
from fsdplaunch.config.schema.walk import KeySpec, keys_by_path
from fsdplaunch.config.write.render import render
from fsdplaunch.config.write.yaml_edit import set_keys
from fsdplaunch.errors import UsageError
from fsdplaunch.tune.result import TuneResult
from fsdplaunch.tune.table import gain_words, step_words

_HEAD, _REMARK = "# measured by fsdplaunch tune", "# tune:"
"""What our comments begin with: at the top, and before a key."""


def winner_text(
    result: TuneResult, config: Config, *, old: str | None, changes: Sequence[tuple[KeySpec, object]]
) -> str:
    """Return the text of a file that says the kept candidate.

    Args:
        result: With a kept candidate.
        config: The candidate's, resolved.
        old: The text of the user's file, whose comments and layout stay; None where there is none.
        changes: What has to change in it; None as a value takes a key out.
    """
    text = render(config)
    if old is not None:
        try:
            text = set_keys(_without_remarks(old), list(changes))
        except UsageError:  # values shared through anchors: the text cannot be kept
            text = render(config)
    return "\n".join([*_head(result), *_with_gains(text, result)]) + "\n"


def _without_remarks(text: str) -> str:
    """Return a file's text without what an earlier search wrote about its measurements."""
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not line.lstrip().startswith((_HEAD, _REMARK)))


def _head(result: TuneResult) -> Iterator[str]:
    fastest = result.row(result.kept).fastest if result.kept is not None else None
    if fastest is None:
        return
    speed = f", {result.speed:.2f} times the speed before" if result.speed and result.yours.fits else ""
    words = f"{result.script}: {step_words(fastest.median)} per step on {result.world} workers{speed}"
    yield f"{_HEAD} {words}"


def _with_gains(text: str, result: TuneResult) -> Iterator[str]:
    """Yield a text's lines, with a comment before each key that the search changed."""
    gains = {gain.path[-1]: gain for gain in result.gains()}
    for line in text.splitlines():
        name = line.strip().partition(":")[0]
        spellings = [key for key in gains if name in (key, *_short(key))]
        if spellings and not line.lstrip().startswith("#"):
            indent = line[: len(line) - len(line.lstrip())]
            yield f"{indent}{_REMARK} {gain_words(gains[spellings[0]]).partition('  ')[2]}"
        yield line


def _short(key: str) -> tuple[str, ...]:
    """Return the other spellings of a key that a user's file may have."""
    spec = next(spec for spec in keys_by_path().values() if spec.name == key)
    names = (key, *spec.key.aliases)
    return tuple(name.removeprefix(prefix) for name in names for prefix in ("fsdp_", "parallelism_config_", ""))
