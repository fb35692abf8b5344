"""The questions in their order, and what is made of their answers. No prompts: see `fsdplaunch.wizard.session`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fsdplaunch.config.keys import Path, build_config, value_at
from fsdplaunch.config.load import check
from fsdplaunch.config.problems import Problem
from fsdplaunch.config.rules import find_faults, view_of
from fsdplaunch.errors import UsageError
from fsdplaunch.wizard.places import NODES, RENDEZVOUS, WHERE, WORKERS
from fsdplaunch.wizard.question import KEEP, VERSION, Question, Situation, accept, is_answer, proposed
from fsdplaunch.wizard.training import CHECKPOINTS, GOAL, MODEL, PRECISION, WRAP

QUESTIONS = (WHERE, NODES, RENDEZVOUS, WORKERS, MODEL, GOAL, PRECISION, WRAP, CHECKPOINTS)
"""Everything that may be asked, besides one for all further keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """The command-line option that answers a question.

    Attributes:
        name: The answer's name, as `run_wizard` takes it.
        flag: The option.
        metavar: What it takes.
        help: Its help.
    """

    name: str
    flag: str
    metavar: str
    help: str


def flags() -> tuple[Flag, ...]:
    """One option per question, all of them text, in the order of the questions."""
    return tuple(
        Flag(name=question.name, flag=question.flag, metavar=question.metavar, help=question.help)
        for question in QUESTIONS
    )


def earlier(question: Question, situation: Situation) -> Situation:
    """Return the situation with the answers that come before a question, which is all it may depend on.

    Args:
        question: One of QUESTIONS.
        situation: With any answers.
    """
    names = {one.name for one in QUESTIONS[: QUESTIONS.index(question)]}
    return replace(situation, answers={name: text for name, text in situation.answers.items() if name in names})


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


def without_asking(question: Question, given: Mapping[str, str], situation: Situation) -> Situation | None:
    """Return the situation after a question that need not be asked, or None for one that must be.

    Args:
        question: A question that applies.
        given: Answers by question name, as typed.
        situation: The answers to earlier questions.

    Raises:
        UsageError: Its option gives no answer, or contradicts a key that was set by name.
    """
    by_key = next((path for path in question.keys if path in situation.settings), None)
    if question.name in given:
        if by_key is not None:
            msg = f"{question.flag} and --set {'.'.join(by_key)} decide the same"
            raise UsageError(msg, hint="keep one of them")
        return situation.answering(question.name, read_flag(question, given, situation))
    if by_key is not None:
        answer = question.read(build_config(compose(situation)), situation)
        fits = answer is not None and is_answer(question, answer, situation)
        return situation.answering(question.name, answer or "") if fits else situation.without(question.name)
    if not question.asked(situation):
        return situation.answering(question.name, proposed(question, situation))
    return None


def answer_all(situation: Situation, given: Mapping[str, str], *, yes: bool) -> Situation:
    """Answer every question without asking.

    Args:
        situation: Without answers.
        given: Answers by question name, as typed.
        yes: Take every suggestion, also those that nobody has seen.

    Raises:
        UsageError: A given answer is none or has no meaning here; or a question has no safe answer.
    """
    unseen: list[tuple[Question, str]] = []
    for question in QUESTIONS:
        if not question.applies(situation):
            refuse_needless(question, given, situation)
            continue
        after = without_asking(question, given, situation)
        if after is None:
            offer = proposed(question, situation)
            if not (yes or question.certain(situation)) or not is_answer(question, offer, situation):
                unseen.append((question, offer))
            after = situation.answering(question.name, offer)
        situation = after
    if unseen:
        raise _must_ask(unseen)
    return situation


def read_flag(question: Question, given: Mapping[str, str], situation: Situation) -> str:
    """Return the canonical answer that an option gives.

    Args:
        question: The question.
        given: Answers by question name, as typed.
        situation: The answers to earlier questions.

    Raises:
        UsageError: It is no answer.
    """
    try:
        return accept(question, given[question.name], situation)
    except ValueError as error:
        msg = f"{question.flag} {error}"
        raise UsageError(msg, hint=f"{question.flag} {question.metavar}: {question.help}") from None


def refuse_needless(question: Question, given: Mapping[str, str], situation: Situation) -> None:
    """Refuse an option that the other answers leave without a meaning: nothing is accepted and ignored.

    Args:
        question: A question that does not apply.
        given: Answers by question name, as typed.
        situation: The answers to earlier questions.

    Raises:
        UsageError: It was given.
    """
    if question.name in given:
        msg = f"{question.flag} has no meaning with {WHERE.flag} {situation.answers.get(WHERE.name)}"
        raise UsageError(msg, hint=f"leave {question.flag} out, or choose another {WHERE.flag}")


def _must_ask(unseen: list[tuple[Question, str]]) -> UsageError:
    questions = "; ".join(question.text for question, _ in unseen)
    options = " ".join(f"{question.flag} {question.metavar}" for question, _ in unseen)
    taken = ", ".join(f"{question.flag} {offer}" for question, offer in unseen if offer)
    msg = f"cannot answer without asking: {questions}"
    return UsageError(msg, hint=f"pass {options}" + (f", or --yes, which takes {taken}" if taken else ""))


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
