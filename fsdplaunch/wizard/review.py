"""What is shown before anything is written: the file or its changes, memory, the command that repeats it."""

import shlex
from collections.abc import Mapping
from dataclasses import replace
from difflib import unified_diff
from pathlib import Path as FilePath
from typing import Any

from fsdplaunch.config.keys import Path, keys_by_path
from fsdplaunch.config.scalars import flow_text, plain_value
from fsdplaunch.wizard.question import KEEP, Situation
from fsdplaunch.wizard.questions import QUESTIONS, compose
from fsdplaunch.wizard.training import GOAL, memory_words

DEFAULT_FILE = "fsdp.yaml"


def preview(old: str | None, new: str, path: FilePath) -> str:
    """Return the new file, or its differences from the existing one.

    Args:
        old: The existing file's text, or None.
        new: What would be written.
        path: The file.
    """
    if old is None:
        return f"{path} (new)\n" + "".join(f"  {line}\n" for line in new.splitlines())
    lines = list(unified_diff(old.splitlines(), new.splitlines(), f"{path} (now)", str(path), n=2, lineterm=""))
    return "\n".join(lines) + "\n" if lines else f"{path}: nothing changes\n"


def estimate(situation: Situation) -> str | None:
    """Return one line about memory, or None where the model's size is not known.

    Args:
        situation: With all answers.
    """
    goal = situation.answers.get(GOAL.name)
    words, _ = memory_words(goal, situation) if goal and goal != KEEP else ("", None)
    return f"Estimate: {words}, before activations." if words else None


def closing_words(path: FilePath, command: str) -> str:
    """Return what to say once the file is written.

    Args:
        path: The file.
        command: The command that writes it again.
    """
    option = "" if str(path) == DEFAULT_FILE else f" --config {shlex.quote(str(path))}"
    return (
        f"Wrote {path}\n"
        f"Next:   fsdplaunch launch{option} --dry-run train.py    shows what would run, starts nothing\n"
        f"        fsdplaunch launch{option} train.py\n"
        f"Same again without questions:\n"
        f"        {command}"
    )


def repeat_command(situation: Situation, path: FilePath, *, overwrite: bool = False) -> str:
    """Return the command that writes the same file without questions.

    Args:
        situation: With all answers.
        path: The file.
        overwrite: Whether the command must replace a file.
    """
    answers = {name: text for name, text in situation.answers.items() if text != KEEP}
    words = ["fsdplaunch", "config"]
    for question in QUESTIONS:
        if answers.get(question.name):
            words += [question.flag, answers[question.name]]
    fresh = compose(replace(situation, answers=answers, base={}, editing=False, settings={}))
    words += [f"--set={text}" for text in settings_between(fresh, compose(situation))]
    words += ["--output", str(path)] if str(path) != DEFAULT_FILE else []
    return shlex.join([*words, *(["--overwrite"] if overwrite else []), "--yes"])


def settings_between(before: Mapping[Path, Any], after: Mapping[Path, Any]) -> list[str]:
    """Return `KEY=VALUE` texts that turn one set of values into another; an empty VALUE takes a key back.

    Args:
        before: Values by path.
        after: Values by path.
    """
    texts = []
    for path, spec in keys_by_path().items():
        value = after.get(path, spec.default)
        if value == before.get(path, spec.default):
            continue
        texts.append(f"{spec.dotted}={flow_text(plain_value(spec, value)) if path in after else ''}")
    return texts
