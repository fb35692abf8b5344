"""Answers that need no question: given by an option or a key, detected, or suggested and accepted in advance."""

from collections.abc import Mapping

from fsdplaunch.config.schema.walk import build_config
from fsdplaunch.errors import UsageError
from fsdplaunch.wizard.compose import compose
from fsdplaunch.wizard.questions.all import QUESTIONS
from fsdplaunch.wizard.questions.question import Question, accept, is_answer, proposed
from fsdplaunch.wizard.state import WizardState


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
