"""The conversation: an existing file, each question that matters, any further key, what would be written.

Nothing is written here. Leaving with Ctrl-C or Cancel raises KeyboardInterrupt.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Any

from fsdplaunch.config.layers import flag_layer
from fsdplaunch.config.problems import ConfigError
from fsdplaunch.config.render import render
from fsdplaunch.config.schema.config import KeyPath, KeySpec, all_keys, build_config, keys_by_path
from fsdplaunch.errors import UsageError
from fsdplaunch.probe.model_files import describe_model, find_model
from fsdplaunch.wizard.answers import (
    QUESTIONS,
    StartingValues,
    answer_automatically,
    broken_rule,
    compose,
    drop_stale_answers,
    earlier,
    find_problems,
    read_source,
)
from fsdplaunch.wizard.model_questions import MODEL
from fsdplaunch.wizard.prompts import BACK, EXPLAIN, PromptRequest, Prompts
from fsdplaunch.wizard.question import (
    KEEP,
    TYPE_IT,
    Choice,
    Question,
    UserMessages,
    accept,
    can_keep,
    is_answer,
    proposed,
)
from fsdplaunch.wizard.review import WizardResult, conclude, new_text, preview, remarks
from fsdplaunch.wizard.state import VERSION, WizardState

_DONE = "done"


def further_keys(state: WizardState) -> tuple[KeySpec, ...]:
    """Return the keys that no question decides and that have a meaning in the version that is written.

    Args:
        state: With all answers.
    """
    decided = {path for question in QUESTIONS for path in question.keys}
    return tuple(
        spec
        for spec in all_keys()
        if spec.path not in decided
        and not spec.key.unread
        and (state.version in spec.key.versions or spec.path == VERSION)
    )


def ask_settings(
    prompts: Prompts, state: WizardState, say: Callable[[str], None]
) -> dict[KeyPath, Any] | PromptRequest:
    """Let keys be chosen and set until the user has enough; returns all settings, or the wish to go back.

    Args:
        prompts: Who asks.
        state: With all answers.
        say: Where explanations go.
    """
    settings = dict(state.settings)
    while (first := prompts.select("Any other setting?", _first_choices(settings), default="no")) == EXPLAIN:
        say("  Every key that no question above decides; fsdplaunch config explain KEY tells about one.")
    if isinstance(first, PromptRequest) or first == "no":
        return first if isinstance(first, PromptRequest) else settings
    while True:
        chosen = prompts.select("Which key?", _key_choices(state, settings), default=_DONE, filtered=True)
        if chosen == _DONE or isinstance(chosen, PromptRequest):
            return settings
        spec = next(spec for spec in all_keys() if spec.dotted == chosen)
        say(f"  {spec.key.text}")
        answer = _ask_value(prompts, spec)
        if isinstance(answer, str):
            settings[spec.path] = read_setting(spec, answer)


def read_setting(spec: KeySpec, text: str) -> Any:
    """Return the canonical value of a key; None for an empty text, which takes the key back.

    Args:
        spec: The key.
        text: As `--set` takes it.

    Raises:
        ValueError: It is no value of this key.
    """
    layer = flag_layer([f"{spec.dotted}={text}"])
    if layer.problems:
        problem = layer.problems[0]
        raise ValueError(problem.message + (f" ({problem.hint})" if problem.hint else ""))
    return layer.values[spec.path].value


def _first_choices(settings: Mapping[KeyPath, Any]) -> tuple[Choice, ...]:
    so_far = ", ".join(f"{path[-1]} {_shown(path, value)}" for path, value in settings.items())
    return (
        Choice(value="no", title="No", consequence=so_far and f"set so far: {so_far}"),
        Choice(value="yes", title="Yes, choose from all keys"),
    )


def _key_choices(state: WizardState, settings: Mapping[KeyPath, Any]) -> list[Choice]:
    values = compose(state) | dict(settings)
    choices = [Choice(value=_DONE, title="That is all")]
    for spec in further_keys(state):
        value = values.get(spec.path, spec.default)
        now = _shown(spec.path, value)
        choices.append(Choice(value=spec.dotted, title=spec.dotted, consequence=now, detail=spec.key.text))
    return choices


def _shown(path: KeyPath, value: Any) -> str:
    return "not set" if value in (None, (), {}) else keys_by_path()[path].key.kind.write(value)


def _ask_value(prompts: Prompts, spec: KeySpec) -> str | PromptRequest:
    kind = spec.key.kind
    names = kind.choices or (("true", "false") if isinstance(spec.default, bool) else ())
    if names:
        choices = [Choice(value=name, title=name) for name in names]
        return prompts.select(spec.dotted, [*choices, Choice(value="", title="not set")], default=names[0])
    return prompts.line(f"{spec.dotted}:", remark=f"({kind.expects})", problem=lambda text: _problem(spec, text))


def _problem(spec: KeySpec, text: str) -> str | None:
    try:
        read_setting(spec, text)
    except ValueError as error:
        return str(error)
    return None


@dataclass(slots=True, kw_only=True)
class Conversation:
    """One conversation.

    Attributes:
        state: Facts, the edited file's values, what was set by key, and the answers so far.
        given: Answers that options gave, as typed; these are not asked.
        path: The file to be written.
        old: Its text, or None when it does not exist.
        edited: The text that is changed in place, or None for a new text.
        model_folder: A folder with weights that lies here; offered, never taken unseen.
        prompts: Who asks.
        out: Where other words go.
    """

    state: WizardState
    given: Mapping[str, str]
    path: FilePath
    old: str | None
    edited: str | None
    model_folder: FilePath | None
    prompts: Prompts
    out: UserMessages

    def run(self) -> WizardState:
        """Hold the conversation; returns every answer once the user said to write."""
        self._walk()
        while not self._more_settings():
            self._walk(len(QUESTIONS) - 1, step=-1)
        while not self._reviewed():
            pass
        return self.state

    def _walk(self, at: int = 0, *, step: int = 1, again: bool = True) -> None:
        """Go through the questions to the last, from number `at` on, first in the direction of `step`.

        With `again`, questions that have an answer are asked too, and the answer is offered.
        """
        while at < len(QUESTIONS):
            question = QUESTIONS[at]
            before = earlier(question, self.state)
            if self._needs_asking(question, before) and (again or question.name not in self.state.answers):
                step = self._put(question, before)
            elif at == 0:
                step = 1
            at = max(0, at + step)
        self.state = drop_stale_answers(self.state)

    def _needs_asking(self, question: Question, before: WizardState) -> bool:
        """Tell whether a question must be put; else store its answer, or drop it when it does not matter."""
        if not question.applies(before):
            self.state = self.state.without(question.name)
            return False
        try:
            after = answer_automatically(question, self.given, before)
        except UsageError as error:
            self.out.say(f"  {error.message}")
            self._forget_option(question)
            return True
        if after is None:
            return True
        answer = after.answers.get(question.name)
        self.state = self.state.without(question.name)
        if answer is not None:
            self._store(question, answer)
        return False

    def _forget_option(self, question: Question) -> None:
        self.given = {name: text for name, text in self.given.items() if name != question.name}

    def _put(self, question: Question, before: WizardState) -> int:
        """Ask one question; 1 when it was answered, -1 when the one before is wanted."""
        answer = self._ask(question, before)
        if isinstance(answer, PromptRequest):
            return -1
        self._store(question, answer)
        if question is MODEL and answer and (model := self.state.run_facts.model):
            self.out.say(f"  {describe_model(model)}")
        return 1

    def _store(self, question: Question, answer: str) -> None:
        self.state = self.state.answering(question.name, answer)

    def _ask(self, question: Question, before: WizardState) -> str | PromptRequest:
        """Ask until there is an answer the rules agree with, or the user wants to go back."""
        default = self.state.answers.get(question.name)
        if default is None or not is_answer(question, default, before):
            default = str(self.model_folder or "") if question is MODEL else proposed(question, before)
        while True:
            answer = self._prompt(question, before, default)
            if answer == EXPLAIN:
                self.out.say(explanation(question))
            elif isinstance(answer, PromptRequest):
                return answer
            else:
                problem = self._problem(question, before, answer)
                if problem is None:
                    return accept(question, answer, before)
                self.out.say(f"  {problem}")

    def _prompt(self, question: Question, before: WizardState, default: str) -> str | PromptRequest:
        choices = list(question.choices(before))
        if not choices:
            return self._line(question, before, question.text, default)
        if can_keep(question, before):
            in_file = [f"{path[-1]} {before.base[path]}" for path in question.keys if path in before.base]
            choices.insert(0, Choice(value=KEEP, title="As the file says", consequence=", ".join(in_file)))
        if default not in {choice.value for choice in choices}:
            # Something that was typed: offered as a choice of its own.
            choices.insert(0, Choice(value=default, title=default))
        mark = "in the file" if before.editing else "suggested"
        offer = proposed(question, before)
        answer = self.prompts.select(question.text, choices, default=default, marks={offer: mark})
        if answer == TYPE_IT:
            return self._line(question, before, question.typed, "")
        return answer

    def _line(self, question: Question, before: WizardState, text: str, default: str) -> str | PromptRequest:
        return self.prompts.line(
            text,
            default=default,
            remark=question.remark(before),
            problem=lambda line: self._problem(question, before, line),
        )

    def _problem(self, question: Question, before: WizardState, line: str) -> str | None:
        """Return what is wrong with an answer: it is none, or breaks a rule that no later answer can satisfy."""
        try:
            answer = accept(question, line, before)
        except UsageError:
            raise
        except ValueError as error:
            return str(error)
        return broken_rule(question, before.answering(question.name, answer))

    def _more_settings(self) -> bool:
        """Let further keys be set; False when the last question is wanted again."""
        settings = ask_settings(self.prompts, self.state, self.out.say)
        if isinstance(settings, PromptRequest):
            return False
        self.state = replace(self.state, settings=settings)
        return True

    def _reviewed(self) -> bool:
        """Show what would be written and ask; True when it is to be written."""
        self.out.say("")
        self.out.say(preview(self.old, new_text(self.state, self.edited), self.path))
        problems = find_problems(self.state)
        for line in remarks(self.state):
            self.out.say(line)
        for problem in problems:
            self.out.say(str(problem))
        answer = self.prompts.select("Write it?", _endings(self.path, len(problems)), default="write")
        if answer == "cancel":
            raise KeyboardInterrupt
        if answer in ("change", BACK):
            self._change_one()
        elif answer == "all":
            self.out.say(render(build_config(compose(self.state)), full=True))
        elif answer == EXPLAIN:
            self.out.say("  Until you choose to write, nothing on disk changes.")
        return answer == "write"

    def _change_one(self) -> None:
        """Ask one question again, then those that the new answer brings up."""
        answers = [question for question in QUESTIONS if question.name in self.state.answers]
        choices = [
            Choice(value=question.name, title=question.text, consequence=self.state.answers[question.name] or "-")
            for question in answers
        ]
        choices.append(Choice(value="set", title="Any other key"))
        chosen = self.prompts.select("Which answer?", choices)
        if chosen == "set":
            self._more_settings()
            return
        question = next((question for question in answers if question.name == chosen), None)
        if question is None:
            return
        answer = self._ask(question, earlier(question, self.state))
        if isinstance(answer, PromptRequest):
            return
        self._forget_option(question)
        self.state = drop_stale_answers(self.state.answering(question.name, answer))
        self._walk(again=False)


def explanation(question: Question) -> str:
    """Return what a question decides, in the words of the schema.

    Args:
        question: The question.
    """
    lines = [f"  {question.help}"]
    for path in question.keys:
        spec = keys_by_path()[path]
        lines.append(f"  {spec.dotted}: {spec.key.text}")
    return "\n".join([*lines, f"  On the command line: {question.flag} {question.metavar}"])


def _endings(path: FilePath, problems: int) -> Sequence[Choice]:
    wrong = f"{problems} problem" + ("s" if problems > 1 else "") if problems else None
    return (
        Choice(value="write", title=f"Write {path}", disabled=wrong),
        Choice(value="change", title="Change an answer"),
        Choice(value="all", title="Show every key"),
        Choice(value="cancel", title="Cancel: write nothing"),
    )


@dataclass(slots=True, kw_only=True)
class FileChoice:
    """One conversation, about one file in the end.

    Attributes:
        state: Facts and settings; no answers yet.
        given: Answers that options gave, as typed; these are not asked.
        path: The file to be written.
        overwrite: Whether to start over when it exists, without asking.
        out: Where words go that are no prompt.
        prompts: Who asks; a terminal when left out.
    """

    state: WizardState
    given: Mapping[str, str]
    path: FilePath
    overwrite: bool
    out: UserMessages
    prompts: Prompts = field(default_factory=Prompts)

    def run(self) -> WizardResult:
        """Hold the conversation.

        Raises:
            KeyboardInterrupt: The user left.
        """
        try:
            return self._talk()
        except KeyboardInterrupt:
            self.out.say("Nothing was written.")
            raise

    def _talk(self) -> WizardResult:
        edited = self._existing() if self.path.exists() and not self.overwrite else None
        old = self.path.read_text(encoding="utf-8", errors="replace") if self.path.exists() else None
        session = Conversation(
            state=self.state,
            given=self.given,
            path=self.path,
            old=old,
            edited=edited,
            model_folder=find_model(FilePath()),
            prompts=self.prompts,
            out=self.out,
        )
        return conclude(session.run(), path=self.path, overwrite=old is not None, edited=edited)

    def _existing(self) -> str | None:
        """Ask what to do about the file that is there; returns its text when it is to be edited."""
        source = self._readable()
        choices = (
            Choice(value="edit", title=f"Edit {self.path}", disabled=None if source else "it cannot be read"),
            Choice(value="new", title="Start over", consequence="replaces it when you choose to write"),
            Choice(value="other", title="Write to another file"),
        )
        answer: str | PromptRequest = PromptRequest("none")
        while isinstance(answer, PromptRequest):
            answer = self.prompts.select(f"{self.path} exists. What now?", choices)
        if answer == "other":
            self.path = self._other_file()
        if answer != "edit" or source is None:
            return None
        self.state = replace(self.state, base=source.values, editing=True)
        return source.text

    def _readable(self) -> StartingValues | None:
        try:
            return read_source(self.path)
        except ConfigError as error:
            self.out.say(str(error))
        except (OSError, UnicodeDecodeError) as error:
            self.out.say(f"{self.path} cannot be read: {error}")
        return None

    def _other_file(self) -> FilePath:
        answer: str | PromptRequest = PromptRequest("none")
        while isinstance(answer, PromptRequest):
            answer = self.prompts.line("Which file?", problem=_file_problem)
        return FilePath(answer)


def _file_problem(text: str) -> str | None:
    path = FilePath(text.strip())
    if not text.strip():
        return "must be a file's name"
    if path.exists():
        return f"{path} exists too"
    return None if path.absolute().parent.is_dir() else f"{path.parent} is no folder"
