"""What a question is: data and pure functions. Who asks it, and how, is the matter of `wizard.conversation`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fsdplaunch.config.schema.config import Config, KeyPath, build_config
from fsdplaunch.errors import LaunchError
from fsdplaunch.wizard.state import WizardState

KEEP = "keep"
"""The answer that leaves a question's keys as the existing file says them."""
TYPE_IT = "..."
"""The choice that opens a line to type an answer in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One answer to choose.

    Attributes:
        value: The answer as a flag gives it.
        title: The answer in words.
        consequence: What it costs or brings here, in a few words; shown beside the title.
        detail: More about it; shown below the list while the cursor is on it.
        disabled: Why it cannot be chosen here, or None.
    """

    value: str
    title: str
    consequence: str = ""
    detail: str = ""
    disabled: str | None = None


def _always(_: WizardState) -> bool:
    return True


def _no_choices(_: WizardState) -> tuple[Choice, ...]:
    return ()


def _no_remark(_: WizardState) -> str:
    return ""


def _by_place(_: WizardState) -> str:
    return "where"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question.

    Attributes:
        name: Of the answer, and of the flag: `--name`.
        text: What is asked.
        help: One sentence for the flag's help and for `?`.
        metavar: What the flag takes, for its help.
        keys: The configuration keys it decides; no other part of the wizard writes them.
        write: The keys' values for an answer.
        read: The answer that a configuration holds; None when no answer says it.
        check: Text as typed -> canonical answer; ValueError says what is wrong. None: only choices are answers.
        applies: Whether the answer matters.
        asked: Whether it is asked when it matters; otherwise the suggestion is taken.
        choices: What can be chosen; none for a line of text.
        typed: What the line that `TYPE_IT` opens asks for.
        remark: Shown behind the text.
        decided_by: The name of the earlier question whose answer leaves this one without a meaning.
        certain: Whether the suggestion may be taken without anybody having seen it.
    """

    name: str
    text: str
    help: str
    metavar: str
    keys: tuple[KeyPath, ...]
    write: Callable[[str, WizardState], Mapping[KeyPath, Any]]
    read: Callable[[Config, WizardState], str | None]
    check: Callable[[str, WizardState], str] | None = None
    applies: Callable[[WizardState], bool] = _always
    asked: Callable[[WizardState], bool] = _always
    choices: Callable[[WizardState], tuple[Choice, ...]] = _no_choices
    typed: str = ""
    remark: Callable[[WizardState], str] = _no_remark
    decided_by: Callable[[WizardState], str] = _by_place
    certain: Callable[[WizardState], bool] = _always

    @property
    def flag(self) -> str:
        """Return the option that answers it."""
        return f"--{self.name}"


def accept(question: Question, text: str, state: WizardState) -> str:
    """Return the canonical answer.

    Args:
        question: The question.
        text: As typed, chosen or given by flag.
        state: The answers to earlier questions.

    Raises:
        ValueError: It is no answer; the text says why.
    """
    text = text.strip()
    if text == KEEP and can_keep(question, state):
        return KEEP
    for choice in question.choices(state):
        if choice.value == text.lower() and choice.value != TYPE_IT:
            if choice.disabled:
                msg = f"{choice.value} is not possible: {choice.disabled}"
                raise ValueError(msg)
            return choice.value
    if question.check is None:
        msg = f"must be one of {', '.join(choice.value for choice in question.choices(state))}, got {text!r}"
        raise ValueError(msg)
    try:
        return question.check(text, state)
    except LaunchError as error:
        raise ValueError(error.message) from None


def can_keep(question: Question, state: WizardState) -> bool:
    """Tell whether the edited file says something here that no answer can say on this machine.

    Args:
        question: The question.
        state: With the file's values.
    """
    if not any(path in state.base for path in question.keys):
        return False
    answer = _from_file(question, state)
    return answer is None or not is_answer(question, answer, state)


def _from_file(question: Question, state: WizardState) -> str | None:
    return question.read(build_config(state.base), state)


def proposed(question: Question, state: WizardState) -> str:
    """Return the answer to offer first: the file's when one is edited, else the suggestion's.

    Args:
        question: The question.
        state: The answers to earlier questions.
    """
    offers = [_from_file(question, state)] if state.editing else []
    if state.editing and can_keep(question, state):
        offers.insert(0, KEEP)
    offers += [question.read(state.suggestion.config, state)]
    offers += [choice.value for choice in question.choices(state) if not choice.disabled]
    for offer in offers:
        if offer is not None and is_answer(question, offer, state):
            return offer
    return ""


def is_answer(question: Question, text: str, state: WizardState) -> bool:
    """Tell whether a text answers a question.

    Args:
        question: The question.
        text: The text.
        state: The answers to earlier questions.
    """
    try:
        accept(question, text, state)
    except ValueError:
        return False
    return True


class UserMessages(Protocol):
    """Where such words go: `fsdplaunch.cli.output.Output`, or a list in a test."""

    def say(self, text: str) -> None:
        """Tell the user something, on stderr."""
