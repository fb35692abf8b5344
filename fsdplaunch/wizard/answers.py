"""From questions to values: answers that need no asking, what all together write, the rules they break."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any

from fsdplaunch.config.layers import Layer, file_layer, flag_layer
from fsdplaunch.config.load import check, read_file
from fsdplaunch.config.problems import ConfigError, Problem
from fsdplaunch.config.rules.base import find_violations, rule_context
from fsdplaunch.config.schema.config import KeyPath, build_config, value_at
from fsdplaunch.errors import UsageError
from fsdplaunch.wizard.model_questions import CHECKPOINTS, GOAL, MODEL, PRECISION, WRAP
from fsdplaunch.wizard.question import KEEP, Question, accept, is_answer, proposed
from fsdplaunch.wizard.run_questions import NODES, RENDEZVOUS, WHERE, WORKERS, XLA, XLA_GRAD_CKPT, XLA_SETTINGS
from fsdplaunch.wizard.state import VERSION, WizardState

_PLACE = (WHERE, NODES, RENDEZVOUS, WORKERS, XLA, XLA_GRAD_CKPT, XLA_SETTINGS)
QUESTIONS = (*_PLACE, MODEL, GOAL, PRECISION, WRAP, CHECKPOINTS)
"""Everything that may be asked, besides one for all further keys."""


def earlier(question: Question, state: WizardState) -> WizardState:
    """Return the state with the answers that come before a question, which is all it may depend on.

    Args:
        question: One of QUESTIONS.
        state: With any answers.
    """
    names = {one.name for one in QUESTIONS[: QUESTIONS.index(question)]}
    return replace(state, answers={name: text for name, text in state.answers.items() if name in names})


def check_names(given: Mapping[str, str]) -> None:
    """Refuse answers to questions that do not exist.

    Args:
        given: Answers by question name.

    Raises:
        UsageError: A name is no question's.
    """
    names = [question.name for question in QUESTIONS]
    for name in given:
        if name not in names:
            msg = f"{name} is not a question of the wizard"
            raise UsageError(msg, hint=f"its questions are {', '.join(names)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingValues:
    """A file whose values the answers start from.

    Attributes:
        text: The file's text.
        values: What it says, canonical, by path.
    """

    text: str
    values: Mapping[KeyPath, Any]


def read_source(path: FilePath) -> StartingValues:
    """Read a file whose values the answers start from.

    Args:
        path: The file.

    Raises:
        ConfigError: It says something that cannot be understood.
    """
    layer = file_layer(read_file(path, FilePath.cwd()))
    values = _values(layer)
    return StartingValues(text=path.read_text(encoding="utf-8"), values=values)


def read_overrides(overrides: Sequence[str]) -> dict[KeyPath, Any]:
    """Return the values that `KEY=VALUE` texts set, by path; None takes a key back.

    Args:
        overrides: As `--set` takes them.

    Raises:
        ConfigError: One of them names no key or gives it none of its values.
    """
    return _values(flag_layer(overrides))


def _values(layer: Layer) -> dict[KeyPath, Any]:
    if layer.problems:
        raise ConfigError(layer.problems)
    return {path: one.value for path, one in layer.values.items()}


def drop_stale_answers(state: WizardState) -> WizardState:
    """Return the state with every answer dropped that no longer matters or is no longer possible.

    Args:
        state: With any answers.
    """
    kept = replace(state, answers={})
    for question in QUESTIONS:
        answer = state.answers.get(question.name)
        if answer is not None and question.applies(kept) and is_answer(question, answer, kept):
            kept = kept.answering(question.name, accept(question, answer, kept))
    return kept


def compose(state: WizardState) -> dict[KeyPath, Any]:
    """Return the values to write, by path.

    What was not asked comes from the edited file, else from the suggestion; a key that a question decides comes
    from its answer alone; a key that was set by name wins.

    Args:
        state: With consistent answers.
    """
    suggested = state.suggestion.config
    values = dict(state.base) if state.editing else _pinned(state)
    for question in QUESTIONS:
        answer = state.answers.get(question.name)
        if answer is None and question.applies(state):
            if state.editing:
                continue  # not asked yet: the file's values stand
            answer = question.read(suggested, state)
        if _file_stands(question, answer, state):
            continue
        values = {path: value for path, value in values.items() if path not in question.keys}
        if answer is not None:
            values |= question.write(answer, state)
    if not state.on_tpus:  # torch's FSDP has versions
        values[VERSION] = state.version
    values |= state.settings
    return {path: value for path, value in values.items() if value is not None}


def _file_stands(question: Question, answer: str | None, state: WizardState) -> bool:
    """Tell whether an answer only repeats the edited file, whose own spelling then stays."""
    if answer == KEEP or not state.editing:
        return answer == KEEP
    file = in_file(state)
    if answer is None or question.name not in file.answers:
        return answer is None and not question.applies(file)  # it did not matter before either
    return answer == file.answers[question.name] and question.write(answer, state) == question.write(answer, file)


def in_file(state: WizardState) -> WizardState:
    """Return the state with the edited file's own answers.

    Args:
        state: With the file's values.
    """
    found, config = replace(state, answers={}), build_config(state.base)
    for question in QUESTIONS:
        answer = question.read(config, found) if question.applies(found) else None
        found = found if answer is None else found.answering(question.name, answer)
    return found


def _pinned(state: WizardState) -> dict[KeyPath, Any]:
    suggestion = state.suggestion
    return {path: value_at(suggestion.config, path) for path in suggestion.pins}


def find_problems(state: WizardState) -> tuple[Problem, ...]:
    """Return the rules broken by the values that would be written.

    Args:
        state: With any answers.
    """
    return check(build_config(compose(state)))


def broken_rule(question: Question, state: WizardState) -> str | None:
    """Return which rule an answer breaks, or None; rules about what is asked later stay silent.

    Args:
        question: The question just answered.
        state: With the answers up to this one.
    """
    place = QUESTIONS.index(question) + 1
    answered = {path for one in QUESTIONS[:place] for path in one.keys} | {*state.settings} | {VERSION}
    open_ones = {path for one in QUESTIONS[place:] for path in one.keys} - answered
    for _, violation in find_violations(rule_context(build_config(compose(state)))):
        about = {*violation.about}
        if about & {*question.keys} and not about & open_ones:
            return violation.message + (f" ({violation.hint})" if violation.hint else "")
    return None


def answer_automatically(question: Question, given: Mapping[str, str], state: WizardState) -> WizardState | None:
    """Return the state after a question that need not be asked, or None for one that must be.

    Args:
        question: A question that applies.
        given: Answers by question name, as typed.
        state: The answers to earlier questions.

    Raises:
        UsageError: Its option gives no answer, or contradicts a key that was set by name.
    """
    by_key = next((path for path in question.keys if path in state.settings), None)
    if question.name in given:
        if by_key is not None:
            msg = f"{question.flag} and --set {'.'.join(by_key)} decide the same"
            raise UsageError(msg, hint="keep one of them")
        return state.answering(question.name, read_flag(question, given, state))
    if by_key is not None:
        answer = question.read(build_config(compose(state)), state)
        fits = answer is not None and is_answer(question, answer, state)
        return state.answering(question.name, answer or "") if fits else state.without(question.name)
    if not question.asked(state):
        return state.answering(question.name, proposed(question, state))
    return None


def answer_all(state: WizardState, given: Mapping[str, str], *, yes: bool) -> WizardState:
    """Answer every question without asking.

    Args:
        state: Without answers.
        given: Answers by question name, as typed.
        yes: Take every suggestion, also those that nobody has seen.

    Raises:
        UsageError: A given answer is none or has no meaning here; or a question has no safe answer.
    """
    unseen: list[tuple[Question, str]] = []
    for question in QUESTIONS:
        if not question.applies(state):
            refuse_needless(question, given, state)
            continue
        after = answer_automatically(question, given, state)
        if after is None:
            offer = proposed(question, state)
            if not (yes or question.certain(state)) or not is_answer(question, offer, state):
                unseen.append((question, offer))
            after = state.answering(question.name, offer)
        state = after
    if unseen:
        raise _must_ask(unseen)
    return state


def read_flag(question: Question, given: Mapping[str, str], state: WizardState) -> str:
    """Return the canonical answer that an option gives.

    Args:
        question: The question.
        given: Answers by question name, as typed.
        state: The answers to earlier questions.

    Raises:
        UsageError: It is no answer.
    """
    try:
        return accept(question, given[question.name], state)
    except UsageError:
        raise
    except ValueError as error:
        msg = f"{question.flag} {error}"
        raise UsageError(msg, hint=f"{question.flag} {question.metavar}: {question.help}") from None


def refuse_needless(question: Question, given: Mapping[str, str], state: WizardState) -> None:
    """Refuse an option that the other answers leave without a meaning: nothing is accepted and ignored.

    Args:
        question: A question that does not apply.
        given: Answers by question name, as typed.
        state: The answers to earlier questions.

    Raises:
        UsageError: It was given.
    """
    if question.name in given:
        decided_by = question.decided_by(state)
        msg = f"{question.flag} has no meaning with --{decided_by} {state.answers.get(decided_by)}"
        raise UsageError(msg, hint=f"leave {question.flag} out, or choose another --{decided_by}")


def _must_ask(unseen: list[tuple[Question, str]]) -> UsageError:
    questions = "; ".join(question.text for question, _ in unseen)
    options = " ".join(f"{question.flag} {question.metavar}" for question, _ in unseen)
    taken = ", ".join(f"{question.flag} {offer}" for question, offer in unseen if offer)
    msg = f"cannot answer without asking: {questions}"
    return UsageError(msg, hint=f"pass {options}" + (f", or --yes, which takes {taken}" if taken else ""))
