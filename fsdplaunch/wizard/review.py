"""What the wizard comes to: the text to write or its changes, memory, notes, the command that repeats it."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path as FilePath
from typing import Any

from fsdplaunch.config.load import DEFAULT_FILE
from fsdplaunch.config.render import render, set_keys
from fsdplaunch.config.schema.config import Config, KeyPath, build_config, keys_by_path
from fsdplaunch.config.yaml_text import flow_text, plain_value
from fsdplaunch.errors import UsageError
from fsdplaunch.wizard.answers import compose
from fsdplaunch.wizard.question import KEEP
from fsdplaunch.wizard.questions import GOAL, QUESTIONS, memory_words
from fsdplaunch.wizard.state import WizardState


@dataclass(frozen=True, slots=True, kw_only=True)
class WizardResult:
    """What the wizard came to.

    Attributes:
        path: The file to write; not always the given one, the user may have named another.
        text: Its whole text.
        config: What it says, not resolved.
        answers: Every answer by question name.
        reasons: Each suggested value that was taken, and why.
        notes: What the reader should know and no key can say.
        command: The command that writes the same file without questions; "" where it began with another file.
    """

    path: FilePath
    text: str
    config: Config
    answers: Mapping[str, str]
    reasons: Sequence[str]
    notes: tuple[str, ...]
    command: str


def conclude(
    state: WizardState, *, path: FilePath, overwrite: bool = False, edited: str | None = None
) -> WizardResult:
    """Return the result of a situation with every answer.

    Args:
        state: With every answer.
        path: The file to write.
        overwrite: Whether the command that repeats it must replace a file.
        edited: The text of the file that is changed in place; None for a new text.
    """
    values, suggestion = compose(state), state.suggestion
    taken = [path for path, value in suggestion.values.items() if values.get(path) == value]
    return WizardResult(
        path=path,
        text=new_text(state, edited),
        config=build_config(values),
        answers=dict(state.answers),
        reasons=[_reason(path, values[path], suggestion.reasons[".".join(path)]) for path in taken],
        notes=_notes(state),
        command=_repeat_command(state, path, overwrite=overwrite),
    )


def _reason(path: KeyPath, value: Any, why: str) -> str:
    return f"{'.'.join(path)}: {flow_text(plain_value(keys_by_path()[path], value))} ({why})"


def new_text(state: WizardState, edited: str | None) -> str:
    """Return the text to write: the edited file with only its changed keys touched, else a new one."""
    values = compose(state)
    changed = [path for path in keys_by_path() if values.get(path) != state.base.get(path)]
    if edited is not None:
        try:
            return set_keys(edited, [(keys_by_path()[path], values.get(path)) for path in changed])
        except UsageError:
            pass  # values shared through anchors: the text cannot be kept
    return render(build_config(values))


def preview(old: str | None, new: str, path: FilePath) -> str:
    """Return the new file, or its differences from the existing one, whose text is `old`."""
    if old is None:
        return f"{path} (new)\n" + "".join(f"  {line}\n" for line in new.splitlines())
    lines = list(unified_diff(old.splitlines(), new.splitlines(), f"{path} (now)", str(path), n=2, lineterm=""))
    return "\n".join(lines) + "\n" if lines else f"{path}: nothing changes\n"


def remarks(state: WizardState) -> list[str]:
    """Return what to print below the text: the estimate, and what no key can say."""
    goal = state.answers.get(GOAL.name)
    words, _ = memory_words(goal, state) if goal and goal != KEEP else ("", None)
    model = state.run_facts.model
    more = f"; fsdplaunch estimate {shlex.quote(str(model.folder))} says more" if model and model.folder else ""
    lines = [f"Estimate: {words}, before activations{more}."] if words else []
    return [*lines, *(f"Note: {note}" for note in _notes(state))]


def _notes(state: WizardState) -> tuple[str, ...]:
    return tuple(note for note in state.suggestion.notes if note not in state.facts.hardware.notes)


def closing_words(path: FilePath, command: str) -> str:
    """Return what to print once the file is written; `command` writes it again."""
    option = "" if str(path) == DEFAULT_FILE else f" --config {shlex.quote(str(path))}"
    lines = [
        f"Wrote {path}",
        f"Next:   fsdplaunch launch{option} --dry-run train.py    shows what would run, starts nothing",
        f"        fsdplaunch launch{option} train.py",
        f"        fsdplaunch tune{option} train.py    measures which configuration is fastest",
        *(("Same again without questions:", f"        {command}") if command else ()),
    ]
    return "\n".join(lines)


def _repeat_command(state: WizardState, file: FilePath, *, overwrite: bool) -> str:
    """Return the command that writes the same file without questions; "" where it began with another file."""
    if state.editing:
        return ""
    words = ["fsdplaunch", "config"]
    for question in QUESTIONS:
        by_key = state.settings.keys() & {*question.keys}  # an option and a key that decide the same are refused
        if state.answers.get(question.name) and not by_key:
            words += [question.flag, state.answers[question.name]]
    for path, value in state.settings.items():
        spec = keys_by_path()[path]
        words.append(f"--set={spec.dotted}={'' if value is None else flow_text(plain_value(spec, value))}")
    words += ["--output", str(file)] if str(file) != DEFAULT_FILE else []
    return shlex.join([*words, *(["--overwrite"] if overwrite else []), "--yes"])
