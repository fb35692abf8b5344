"""What is shown before anything is written: the file or its changes, memory, the command that repeats it."""

import shlex
from collections.abc import Mapping
from difflib import unified_diff
from pathlib import Path as FilePath
from typing import Any

from fsdplaunch.config.load.load import DEFAULT_FILE
from fsdplaunch.config.schema.walk import Path, keys_by_path
from fsdplaunch.config.write.yaml_scalars import flow_text, plain_value
from fsdplaunch.wizard.auto_answers import answer_all
from fsdplaunch.wizard.compose import compose
from fsdplaunch.wizard.questions.all import QUESTIONS
from fsdplaunch.wizard.questions.question import KEEP
from fsdplaunch.wizard.questions.sharding_goal import GOAL, memory_words
from fsdplaunch.wizard.state import NEWEST, VERSION, WizardState
from fsdplaunch.wizard.step_memory import step_words


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


def remarks(state: WizardState) -> list[str]:
    """Return what to say below the text: the estimate, and what no key can say.

    Args:
        state: With all answers.
    """
    goal = state.answers.get(GOAL.name)
    words, _ = memory_words(goal, state) if goal and goal != KEEP else ("", None)
    lines = [f"Estimate: {words}, before activations."] if words else []
    lines += step_words(state)
    notes = [note for note in state.suggestion.notes if note not in state.facts.hardware.notes]
    return [*lines, *(f"Note: {note}" for note in notes)]


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


def repeat_command(state: WizardState, file: FilePath, *, overwrite: bool = False) -> str:
    """Return the command that writes the same file without questions.

    Args:
        state: With all answers.
        file: The file.
        overwrite: Whether the command must replace a file.
    """
    answers, settings = _repeatable_answers(state)
    words = ["fsdplaunch", "config"]
    for question in QUESTIONS:
        if answers.get(question.name):
            words += [question.flag, answers[question.name]]
    for path, spec in keys_by_path().items():
        if path in settings:
            value = settings[path]
            words.append(f"--set={spec.dotted}={'' if value is None else flow_text(plain_value(spec, value))}")
    words += ["--output", str(file)] if str(file) != DEFAULT_FILE else []
    return shlex.join([*words, *(["--overwrite"] if overwrite else []), "--yes"])


def _repeatable_answers(state: WizardState) -> tuple[dict[str, str], dict[Path, Any]]:
    """Return the options and `--set`s that lead to the same values without questions and without a file."""
    answers = {name: text for name, text in state.answers.items() if text != KEEP}
    settings: dict[Path, Any] = {} if state.version == NEWEST else {VERSION: state.version}
    target = compose(state)
    while True:
        fresh = WizardState(facts=state.facts, settings=settings)
        missed = _differences(compose(answer_all(fresh, answers, yes=True)), target)
        if not missed:
            return answers, settings
        settings |= missed
        # An option and a key that decide the same are refused together.
        by_key = {one.name for one in QUESTIONS if settings.keys() & {*one.keys}}
        answers = {name: text for name, text in answers.items() if name not in by_key}
        left = WizardState(facts=state.facts, answers=answers, settings=settings)
        answers = {one.name: answers[one.name] for one in QUESTIONS if one.name in answers and one.applies(left)}


def _differences(before: Mapping[Path, Any], after: Mapping[Path, Any]) -> dict[Path, Any]:
    """Return the values that turn one configuration into another; None takes a key back."""
    paths = [
        path
        for path, spec in keys_by_path().items()
        if before.get(path, spec.default) != after.get(path, spec.default)
    ]
    return {path: after.get(path) for path in paths}
