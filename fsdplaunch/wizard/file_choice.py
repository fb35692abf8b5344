"""The conversation from its first word to its last: an existing file, the questions, the review."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path as FilePath

from fsdplaunch.config.load.problems import ConfigError
from fsdplaunch.probe.model_folder import find_model
from fsdplaunch.wizard.conversation import Conversation
from fsdplaunch.wizard.prompts import PromptRequest, Prompts
from fsdplaunch.wizard.questions.question import Choice
from fsdplaunch.wizard.questions.user_messages import UserMessages
from fsdplaunch.wizard.result import WizardResult, conclude
from fsdplaunch.wizard.starting_values import StartingValues, read_source
from fsdplaunch.wizard.state import WizardState


class FileChoice:
    """One conversation, about one file in the end.

    Args:
        state: Facts and settings; no answers yet.
        given: Answers that options gave, as typed; these are not asked.
        path: The file to be written.
        overwrite: Whether to start over when it exists, without asking.
        out: Where words go that are no prompt.
        prompts: Who asks; a terminal when left out.
    """

    def __init__(
        self,
        state: WizardState,
        *,
        given: Mapping[str, str],
        path: FilePath,
        overwrite: bool,
        out: UserMessages,
        prompts: Prompts | None = None,
    ) -> None:
        self._state = state
        self._given = given
        self._path = path
        self._overwrite = overwrite
        self._out = out
        self._prompts = prompts or Prompts()

    def run(self) -> WizardResult:
        """Hold the conversation.

        Raises:
            KeyboardInterrupt: The user left.
        """
        try:
            return self._talk()
        except KeyboardInterrupt:
            self._out.say("Nothing was written.")
            raise

    def _talk(self) -> WizardResult:
        edited = self._existing() if self._path.exists() and not self._overwrite else None
        old = self._path.read_text(encoding="utf-8", errors="replace") if self._path.exists() else None
        session = Conversation(
            self._state,
            given=self._given,
            path=self._path,
            old=old,
            edited=edited,
            model_folder=find_model(FilePath()),
            prompts=self._prompts,
            out=self._out,
        )
        return conclude(session.run(), path=self._path, overwrite=old is not None, edited=edited)

    def _existing(self) -> str | None:
        """Ask what to do about the file that is there; returns its text when it is to be edited."""
        source = self._readable()
        choices = (
            Choice(value="edit", title=f"Edit {self._path}", disabled=None if source else "it cannot be read"),
            Choice(value="new", title="Start over", consequence="replaces it when you choose to write"),
            Choice(value="other", title="Write to another file"),
        )
        answer: str | PromptRequest = PromptRequest("none")
        while isinstance(answer, PromptRequest):
            answer = self._prompts.select(f"{self._path} exists. What now?", choices)
        if answer == "other":
            self._path = self._other_file()
        if answer != "edit" or source is None:
            return None
        self._state = replace(self._state, base=source.values, editing=True)
        return source.text

    def _readable(self) -> StartingValues | None:
        try:
            return read_source(self._path)
        except ConfigError as error:
            self._out.say(str(error))
        except (OSError, UnicodeDecodeError) as error:
            self._out.say(f"{self._path} cannot be read: {error}")
        return None

    def _other_file(self) -> FilePath:
        answer: str | PromptRequest = PromptRequest("none")
        while isinstance(answer, PromptRequest):
            answer = self._prompts.line("Which file?", problem=_file_problem)
        return FilePath(answer)


def _file_problem(text: str) -> str | None:
    path = FilePath(text.strip())
    if not text.strip():
        return "must be a file's name"
    if path.exists():
        return f"{path} exists too"
    return None if path.absolute().parent.is_dir() else f"{path.parent} is no folder"
