"""What a question is: data and pure functions. Who asks it, and how, is the matter of `wizard.conversation`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fsdplaunch.config.schema.config import Config, KeyPath, build_config, keys_by_path, value_at
from fsdplaunch.errors import LaunchError
from fsdplaunch.wizard.state import WizardState

KEEP = "keep"  # the answer that leaves a question's keys as the existing file says them
TYPE_IT = "..."  # the choice that opens a line to type an answer in


class UserMessages(Protocol):
    """Where words go that are not a prompt: `fsdplaunch.cli.output.Output`, or a list in a test."""

    def say(self, text: str) -> None:
        """Print something, on stderr."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer to choose."""

    value: str  # the answer as a flag gives it
    title: str  # the answer in words
    consequence: str = ""  # what it costs or brings here, in a few words; shown beside the title
    detail: str = ""  # more about it; shown below the list while the cursor is on it
    disabled: str | None = None  # why it cannot be chosen here, or None


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question. What it does not say itself comes from the schema of its first key."""

    name: str  # of the answer, and of the flag: `--name`
    help: str  # one sentence for the flag's help and for `?`
    metavar: str  # what the flag takes, for its help
    keys: tuple[KeyPath, ...]  # the configuration keys it decides; no other part of the wizard writes them
    text: str = ""  # what is asked
    write: Callable[[str, WizardState], Mapping[KeyPath, Any]] | None = None  # the keys' values for an answer
    # The answer that a configuration holds; None when no answer says it.
    read: Callable[[Config, WizardState], str | None] | None = None
    # Text as typed -> canonical answer; ValueError says what is wrong. None: only choices are answers.
    check: Callable[[str, WizardState], str] | None = None
    # Whether the answer matters.
    applies: Callable[[WizardState], bool] = lambda state: True  # noqa: ARG005
    # Whether it is asked when it matters; otherwise the suggestion is taken.
    asked: Callable[[WizardState], bool] = lambda state: True  # noqa: ARG005
    # What can be chosen; none for a line of text.
    choices: Callable[[WizardState], tuple[Choice, ...]] = lambda state: ()  # noqa: ARG005
    # Shown behind a line of text.
    remark: Callable[[WizardState], str] = lambda state: ""  # noqa: ARG005
    # Whether the suggestion may be taken without anybody having seen it.
    certain: Callable[[WizardState], bool] = lambda state: True  # noqa: ARG005

    @property
    def flag(self) -> str:
        """Return the option that answers it."""
        return f"--{self.name}"

    @property
    def words(self) -> str:
        """Return what is asked."""
        return self.text or keys_by_path()[self.keys[0]].key.question or ""

    def values(self, answer: str, state: WizardState) -> Mapping[KeyPath, Any]:
        """Return the keys' values for an answer."""
        if self.write is not None:
            return self.write(answer, state)
        path = self.keys[0]
        return {path: keys_by_path()[path].key.kind.parse(answer)}

    def answer_in(self, config: Config, state: WizardState) -> str | None:
        """Return the answer that a configuration holds; None when no answer says it."""
        if self.read is not None:
            return self.read(config, state)
        return keys_by_path()[self.keys[0]].key.kind.write(value_at(config, self.keys[0]))

    def accept(self, text: str, state: WizardState) -> str:
        """Return the canonical answer of a text that was typed, chosen or given by flag.

        Raises:
            ValueError: It is not an answer after those to earlier questions; the text says why.
        """
        text = text.strip()
        if text == KEEP and self.can_keep(state):
            return KEEP
        choices = self.choices(state)
        for choice in choices:
            if choice.value == text.lower() and choice.value != TYPE_IT:
                if choice.disabled:
                    msg = f"{choice.value} is not possible: {choice.disabled}"
                    raise ValueError(msg)
                return choice.value
        if self.check is None:
            msg = f"must be one of {', '.join(choice.value for choice in choices)}, got {text!r}"
            raise ValueError(msg)
        try:
            return self.check(text, state)
        except LaunchError as error:
            raise ValueError(error.message) from None

    def is_answer(self, text: str | None, state: WizardState) -> bool:
        """Return whether a text answers it, given the answers to earlier questions."""
        try:
            return text is not None and self.accept(text, state) is not None
        except ValueError:
            return False

    def can_keep(self, state: WizardState) -> bool:
        """Return whether the edited file says something here that no answer can say on this machine."""
        in_file = any(path in state.base for path in self.keys)
        return in_file and not self.is_answer(self.answer_in(build_config(state.base), state), state)

    def proposed(self, state: WizardState) -> str:
        """Return the answer to offer first: the file's when one is edited, else the suggestion's."""
        offers = [self.answer_in(build_config(state.base), state)] if state.editing else []
        if state.editing and self.can_keep(state):
            offers.insert(0, KEEP)
        offers += [self.answer_in(state.suggestion.config, state)]
        offers += [choice.value for choice in self.choices(state) if not choice.disabled]
        return next((offer for offer in offers if offer is not None and self.is_answer(offer, state)), "")
