"""From questions to values: answers that need no asking, what all together write, which rules they break."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import unified_diff
from pathlib import Path as FilePath
from typing import Any

from fsdplaunch.config.layers import file_layer
from fsdplaunch.config.load import DEFAULT_FILE, leaders, read_file
from fsdplaunch.config.problems import ConfigError
from fsdplaunch.config.render import render, set_keys
from fsdplaunch.config.resolve import uses_xla
from fsdplaunch.config.rules.base import RULES, find, rule_context
from fsdplaunch.config.schema.config import Config, KeyPath, build_config, keys_by_path
from fsdplaunch.config.yaml_text import flow_text, plain_value
from fsdplaunch.errors import UsageError
from fsdplaunch.wizard.questions import GOAL, KEEP, QUESTIONS, Question, memory_words
from fsdplaunch.wizard.state import VERSION, WizardState


def earlier(question: Question, state: WizardState) -> WizardState:
    """Return the state with the answers that come before a question, which is all it may depend on."""
    names = {one.name for one in QUESTIONS[: QUESTIONS.index(question)]}
    return replace(state, answers={name: text for name, text in state.answers.items() if name in names})


def read_source(path: FilePath) -> dict[KeyPath, Any]:
    """Return the canonical values of a file from which the answers start, by path.

    Raises:
        ConfigError: It says something that cannot be understood.
    """
    layer = file_layer(read_file(path, FilePath.cwd()))
    if layer.problems:
        raise ConfigError(layer.problems)
    return {path: one.value for path, one in layer.values.items()}


def drop_stale_answers(state: WizardState) -> WizardState:
    """Return the state with every answer dropped that no longer matters or is no longer possible."""
    kept = replace(state, answers={})
    for question in QUESTIONS:
        answer = state.answers.get(question.name)
        if answer is not None and question.applies(kept) and question.is_answer(answer, kept):
            kept = kept.answering(question.name, question.accept(answer, kept))
    return kept


def compose(state: WizardState) -> dict[KeyPath, Any]:
    """Return the values to write, by path.

    What was not asked comes from the edited file, else from the suggestion; a key that a question decides comes
    from its answer alone; a key that was set by name wins.
    """
    suggestion = state.suggestion
    values = dict(state.base if state.editing else suggestion.values)
    for question in QUESTIONS:
        answer = state.answers.get(question.name)
        if answer is None and question.applies(state):
            if state.editing:
                continue  # not asked yet: the file's values stand
            answer = question.answer_in(suggestion.config, state)
        if _file_stands(question, answer, state):
            continue
        values = {path: value for path, value in values.items() if path not in question.keys}
        if answer is not None:
            values |= question.values(answer, state)
    if not state.on_tpus:  # torch's FSDP has versions
        values[VERSION] = state.version
    said = {path for path, value in state.settings.items() if value is not None}
    values = {path: value for path, value in values.items() if said.isdisjoint(leaders(path))}
    values |= state.settings
    return {path: value for path, value in values.items() if value is not None}


def _file_stands(question: Question, answer: str | None, state: WizardState) -> bool:
    """Return whether an answer only repeats the edited file, whose own spelling then stays."""
    if answer == KEEP or not state.editing:
        return answer == KEEP
    file, config = replace(state, answers={}), build_config(state.base)  # with the file's own answers
    for one in QUESTIONS:
        said = one.answer_in(config, file) if one.applies(file) else None
        file = file if said is None else file.answering(one.name, said)
    if answer is None or question.name not in file.answers:
        return answer is None and not question.applies(file)  # it did not matter before either
    same = answer == file.answers[question.name]
    return same and question.values(answer, state) == question.values(answer, file)


def broken_rule(question: Question, state: WizardState) -> str | None:
    """Return which rule the last answer, to `question`, breaks; rules about what is asked later stay silent."""
    place = QUESTIONS.index(question) + 1
    answered = {path for one in QUESTIONS[:place] for path in one.keys} | {*state.settings} | {VERSION}
    open_ones = {path for one in QUESTIONS[place:] for path in one.keys} - answered
    for _, violation in find(RULES, rule_context(build_config(compose(state)))):
        about = {*violation.about}
        if about & {*question.keys} and not about & open_ones:
            return violation.message + (f" ({violation.hint})" if violation.hint else "")
    return None


def answer_automatically(question: Question, given: Mapping[str, str], state: WizardState) -> WizardState | None:
    """Return the state after a question that applies and need not be asked, or None for one that must be.

    Raises:
        UsageError: Its option, in `given` as typed, gives no answer, or contradicts a key that was set by name.
    """
    by_key = next((path for path in question.keys if path in state.settings), None)
    if question.name in given:
        if by_key is not None:
            msg = f"{question.flag} and --set {'.'.join(by_key)} set the same thing"
            raise UsageError(msg, hint="keep one of them")
        try:
            return state.answering(question.name, question.accept(given[question.name], state))
        except ValueError as error:
            msg = f"{question.flag} {error}"
            raise UsageError(msg, hint=f"{question.flag} {question.metavar}: {question.help}") from None
    if by_key is not None:
        answer = question.answer_in(build_config(compose(state)), state)
        fits = question.is_answer(answer, state)
        return state.answering(question.name, answer or "") if fits else state.without(question.name)
    return None if question.asked(state) else state.answering(question.name, question.proposed(state))


def answer_all(state: WizardState, given: Mapping[str, str], *, yes: bool) -> WizardState:
    """Answer every question without asking, from `given` as typed; `yes` takes suggestions that nobody has seen.

    Raises:
        UsageError: A given answer is none or has no meaning here; or a question has no safe answer.
    """
    unseen: list[tuple[Question, str]] = []
    for question in QUESTIONS:
        if not question.applies(state):
            if question.name in given:  # nothing is accepted and ignored
                msg = f"{question.flag} has no meaning with --where {state.answers.get('where')}"
                raise UsageError(msg, hint=f"leave {question.flag} out, or choose another --where")
            continue
        after = answer_automatically(question, given, state)
        if after is None:
            offer = question.proposed(state)
            if not (yes or question.certain(state)) or not question.is_answer(offer, state):
                unseen.append((question, offer))
            after = state.answering(question.name, offer)
        state = after
    if unseen:
        questions = "; ".join(question.words for question, _ in unseen)
        options = " ".join(f"{question.flag} {question.metavar}" for question, _ in unseen)
        taken = ", ".join(f"{question.flag} {offer}" for question, offer in unseen if offer)
        msg = f"cannot answer without asking: {questions}"
        raise UsageError(msg, hint=f"pass {options}" + (f", or --yes, which takes {taken}" if taken else ""))
    return state


@dataclass(frozen=True, slots=True, kw_only=True)
class WizardResult:
    """What the wizard came to."""

    path: FilePath  # the file to write; not always the given one, the user may have named another
    text: str  # its whole text
    config: Config  # what it says, not resolved
    answers: Mapping[str, str]  # every answer by question name
    reasons: Sequence[str]  # each suggested value that was taken, and why
    notes: tuple[str, ...]  # what the reader should know and no key can say
    command: str  # the command that writes the same file without questions; "" where it began with another file


def conclude(
    state: WizardState, *, path: FilePath, overwrite: bool = False, edited: str | None = None
) -> WizardResult:
    """Return the result of a state with every answer; `edited` is the text that is changed in place, or None."""
    values, suggestion = compose(state), state.suggestion
    reasons = []
    for key, value in suggestion.values.items():
        if values.get(key) == value:
            shown, why = flow_text(plain_value(keys_by_path()[key], value)), suggestion.reasons[".".join(key)]
            reasons.append(f"{'.'.join(key)}: {shown} ({why})")
    return WizardResult(
        path=path,
        text=new_text(state, edited),
        config=build_config(values),
        answers=dict(state.answers),
        reasons=reasons,
        notes=suggestion.notes,
        command=_repeat_command(state, path, overwrite=overwrite),
    )


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
    more = f"fsdplaunch estimate {shlex.quote(state.answers.get('model', ''))} says more"
    lines = [f"Estimate: {words}, before activations; {more}."] if words else []
    return [*lines, *(f"Note: {note}" for note in state.suggestion.notes)]


def closing_words(result: WizardResult) -> str:
    """Return what to print once the file is written."""
    option = "" if str(result.path) == DEFAULT_FILE else f" --config {shlex.quote(str(result.path))}"
    can_tune = result.config.distributed_type == "FSDP" and not uses_xla(result.config)
    lines = [
        f"Wrote {result.path}",
        f"Look first:   fsdplaunch launch{option} --dry-run train.py",
        f"Run it:       fsdplaunch launch{option} train.py",
        *((f"Find faster:  fsdplaunch tune{option} train.py",) if can_tune else ()),
        *((f"Write again:  {result.command}",) if result.command else ()),
    ]
    return "\n".join(lines)


def _repeat_command(state: WizardState, file: FilePath, *, overwrite: bool) -> str:
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
