"""Answers that need no question: given by an option or a key, detected, or suggested and accepted in advance."""

from collections.abc import Mapping

from fsdplaunch.config.keys import build_config
from fsdplaunch.errors import UsageError
from fsdplaunch.wizard.compose import compose
from fsdplaunch.wizard.places import WHERE
from fsdplaunch.wizard.question import Question, accept, is_answer, proposed
from fsdplaunch.wizard.questions import QUESTIONS
from fsdplaunch.wizard.situation import Situation


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
