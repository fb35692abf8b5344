"""What the wizard comes to: the text to write or its changes, memory, notes, the command that repeats it."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path as FilePath
from typing import Any

from fsdplaunch.config.load import DEFAULT_FILE
from fsdplaunch.config.render import render, set_keys
from fsdplaunch.config.resolve import resolve
from fsdplaunch.config.schema.config import Config, KeyPath, build_config, keys_by_path, value_at
from fsdplaunch.config.yaml_text import flow_text, plain_value
from fsdplaunch.display_text import GIB
from fsdplaunch.errors import LaunchError, UsageError
from fsdplaunch.features import ESTIMATE, feature
from fsdplaunch.wizard.answers import QUESTIONS, answer_all, compose
from fsdplaunch.wizard.model_questions import GOAL, memory_words
from fsdplaunch.wizard.question import KEEP
from fsdplaunch.wizard.state import NEWEST, VERSION, WizardState


def step_words(state: WizardState) -> Iterator[str]:
    """Yield a line about the memory of one step, activations included; nothing where it is not known.

    Args:
        state: With all answers.
    """
    model, workers = state.run_facts.model, state.workers
    if model is None or model.folder is None or workers is None or state.answers.get("where") == "cpu":
        return
    try:
        estimate = feature(ESTIMATE)
        config, world = resolve(build_config(compose(state))), workers * state.num_nodes
        need = estimate.step_need(config, model.folder, world=world, per_node=workers)
    except LaunchError:
        return  # a family that is not known, a mesh that a rule refuses in its own words, no estimate installed
    memory = state.run_facts.hardware.gpu_memory_bytes
    verdict = estimate.verdict_of(need.gpu, memory)
    limit = f" of {memory / GIB:.0f}" if memory else ""
    fits = f" ({verdict})" if verdict != "unknown" else ""
    yield (
        f"One step of 1 x {need.setup.length} tokens per worker: {need.gpu / GIB:.1f}{limit} GiB per GPU{fits}; "
        f"fsdplaunch estimate {shlex.quote(str(model.folder))} says more."
    )


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


def _repeatable_answers(state: WizardState) -> tuple[dict[str, str], dict[KeyPath, Any]]:
    """Return the options and `--set`s that lead to the same values without questions and without a file."""
    answers = {name: text for name, text in state.answers.items() if text != KEEP}
    settings: dict[KeyPath, Any] = {} if state.version == NEWEST else {VERSION: state.version}
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


def _differences(before: Mapping[KeyPath, Any], after: Mapping[KeyPath, Any]) -> dict[KeyPath, Any]:
    """Return the values that turn one configuration into another; None takes a key back."""
    paths = [
        path
        for path, spec in keys_by_path().items()
        if before.get(path, spec.default) != after.get(path, spec.default)
    ]
    return {path: after.get(path) for path in paths}


@dataclass(frozen=True, slots=True, kw_only=True)
class WizardResult:
    """What the wizard came to.

    Attributes:
        path: The file to write; not always the given one, the user may have named another.
        text: Its whole text.
        config: What it says, not resolved.
        answers: Every answer by question name.
        reasons: Why a suggested value is what it is, by dotted key.
        notes: What the reader should know and no key can say.
        command: The command that writes the same file without questions.
    """

    path: FilePath
    text: str
    config: Config
    answers: Mapping[str, str]
    reasons: Mapping[str, str]
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
    taken = [pin for pin in suggestion.pins if pin in values and values[pin] == value_at(suggestion.config, pin)]
    return WizardResult(
        path=path,
        text=new_text(state, edited),
        config=build_config(values),
        answers=dict(state.answers),
        reasons={".".join(pin): suggestion.reasons[".".join(pin)] for pin in taken},
        notes=tuple(note for note in suggestion.notes if note not in state.facts.hardware.notes),
        command=repeat_command(state, path, overwrite=overwrite),
    )


def new_text(state: WizardState, edited: str | None) -> str:
    """Return the text to write: the edited file with only its changed keys touched, else a new one.

    Args:
        state: With every answer.
        edited: The text of the file that is changed in place, or None.
    """
    values = compose(state)
    if edited is None:
        return render(build_config(values))
    changes = [
        (spec, values.get(path))
        for path, spec in keys_by_path().items()
        if values.get(path) != state.base.get(path)
    ]
    try:
        return set_keys(edited, changes)
    except UsageError:
        return render(build_config(values))  # values shared through anchors: the text cannot be kept
