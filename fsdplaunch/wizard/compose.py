"""Answers -> the values to write, and the rules they break."""

from dataclasses import replace
from typing import Any

from fsdplaunch.config.load.load import check
from fsdplaunch.config.load.problems import Problem
from fsdplaunch.config.rules.base import find_violations, rule_context
from fsdplaunch.config.schema.walk import Path, build_config, value_at
from fsdplaunch.wizard.questions.all import QUESTIONS
from fsdplaunch.wizard.questions.question import KEEP, Question, accept, is_answer
from fsdplaunch.wizard.state import VERSION, WizardState


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


def compose(state: WizardState) -> dict[Path, Any]:
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


def _pinned(state: WizardState) -> dict[Path, Any]:
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
