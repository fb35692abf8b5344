"""Answers -> the values to write, and what the rules say of them."""

from dataclasses import replace
from typing import Any

from fsdplaunch.config.keys import Path, build_config, value_at
from fsdplaunch.config.load import check
from fsdplaunch.config.problems import Problem
from fsdplaunch.config.rules import find_faults, view_of
from fsdplaunch.wizard.question import KEEP, Question, accept, is_answer
from fsdplaunch.wizard.questions import QUESTIONS
from fsdplaunch.wizard.situation import VERSION, Situation


def settle(situation: Situation) -> Situation:
    """Return the situation with every answer dropped that no longer matters or is no longer possible.

    Args:
        situation: With any answers.
    """
    kept = replace(situation, answers={})
    for question in QUESTIONS:
        answer = situation.answers.get(question.name)
        if answer is not None and question.applies(kept) and is_answer(question, answer, kept):
            kept = kept.answering(question.name, accept(question, answer, kept))
    return kept


def compose(situation: Situation) -> dict[Path, Any]:
    """Return the values to write, by path.

    What was not asked comes from the edited file, else from the suggestion; a key that a question decides comes
    from its answer alone; a key that was set by name wins.

    Args:
        situation: With settled answers.
    """
    suggested = situation.suggestion.config
    values = dict(situation.base) if situation.editing else _pinned(situation)
    for question in QUESTIONS:
        answer = situation.answers.get(question.name)
        if answer is None and question.applies(situation):
            if situation.editing:
                continue  # not asked yet: the file's values stand
            answer = question.read(suggested, situation)
        if _file_stands(question, answer, situation):
            continue
        values = {path: value for path, value in values.items() if path not in question.keys}
        if answer is not None:
            values |= question.write(answer, situation)
    values[VERSION] = situation.version
    values |= situation.settings
    return {path: value for path, value in values.items() if value is not None}


def _file_stands(question: Question, answer: str | None, situation: Situation) -> bool:
    """Whether an answer only repeats the edited file, whose own spelling then stays."""
    if answer == KEEP or not situation.editing:
        return answer == KEEP
    file = in_file(situation)
    if answer is None or question.name not in file.answers:
        return answer is None and not question.applies(file)  # it did not matter before either
    return answer == file.answers[question.name] and question.write(answer, situation) == question.write(
        answer, file
    )


def in_file(situation: Situation) -> Situation:
    """Return the situation with the edited file's own answers.

    Args:
        situation: With the file's values.
    """
    found, config = replace(situation, answers={}), build_config(situation.base)
    for question in QUESTIONS:
        answer = question.read(config, found) if question.applies(found) else None
        found = found if answer is None else found.answering(question.name, answer)
    return found


def _pinned(situation: Situation) -> dict[Path, Any]:
    suggestion = situation.suggestion
    return {path: value_at(suggestion.config, path) for path in suggestion.pins}


def find_problems(situation: Situation) -> tuple[Problem, ...]:
    """Return what the rules say against the values that would be written.

    Args:
        situation: With any answers.
    """
    return check(build_config(compose(situation)))


def broken_rule(question: Question, situation: Situation) -> str | None:
    """Return which rule an answer breaks, or None; rules about what is asked later stay silent.

    Args:
        question: The question just answered.
        situation: With the answers up to this one.
    """
    asked = {path for one in QUESTIONS[: QUESTIONS.index(question) + 1] for path in one.keys}
    for _, fault in find_faults(view_of(build_config(compose(situation)))):
        if {*fault.about} & {*question.keys} and {*fault.about} <= asked | {*situation.settings} | {VERSION}:
            return fault.message + (f" ({fault.hint})" if fault.hint else "")
    return None
