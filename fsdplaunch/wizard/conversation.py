"""The conversation: an existing file, each question that matters, any further key, what would be written.

The only importer of questionary. Prompts are drawn on stderr, so that stdout stays free for data; each can be left
backwards (Shift-Tab or Ctrl-B) and asked for an explanation (`?`). Nothing is written here. Leaving with Ctrl-C,
Ctrl-D or Cancel raises KeyboardInterrupt.
"""

import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Any

import questionary
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent, merge_key_bindings
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import Output, create_output

from fsdplaunch.config.layers import flag_layer
from fsdplaunch.config.names import closest
from fsdplaunch.config.problems import ConfigError
from fsdplaunch.config.render import render
from fsdplaunch.config.schema.config import KeyPath, KeySpec, all_keys, build_config, keys_by_path
from fsdplaunch.display_text import one_line, printable
from fsdplaunch.errors import UsageError
from fsdplaunch.probe.model_files import describe_model, find_model
from fsdplaunch.wizard.answers import (
    answer_automatically,
    broken_rule,
    compose,
    drop_stale_answers,
    earlier,
    find_problems,
    read_source,
)
from fsdplaunch.wizard.question import KEEP, TYPE_IT, Choice, Question, UserMessages
from fsdplaunch.wizard.questions import MODEL, QUESTIONS
from fsdplaunch.wizard.review import WizardResult, conclude, new_text, preview, remarks
from fsdplaunch.wizard.state import VERSION, WizardState

HOW_TO = "(Shift-Tab: back, ?: explain)"
_EDGE = 8
_WIDEST = 100


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """Something else than an answer that a prompt was left with."""

    name: str


BACK = PromptRequest("back")
EXPLAIN = PromptRequest("explain")


class Prompts:
    """Asks on a terminal.

    Args:
        output: Where to draw; the terminal behind stderr when left out.
    """

    def __init__(self, output: Output | None = None) -> None:
        self._output = output or create_output(stdout=sys.stderr)

    def select(
        self,
        text: str,
        choices: Sequence[Choice],
        *,
        default: str | None = None,
        marks: dict[str, str] | None = None,
    ) -> str | PromptRequest:
        """Let one of the choices be chosen.

        Args:
            text: The question.
            choices: At least one of them not disabled.
            default: Where the cursor starts.
            marks: Words behind a choice's title, by its value.
        """
        shown = [self._shown(choice, (marks or {}).get(choice.value, "")) for choice in choices]
        start = next((choice for choice in shown if choice.value == default and not choice.disabled), None)
        question = questionary.select(
            self._fitted(text, HOW_TO),
            shown,
            default=start,
            instruction=HOW_TO,
            use_jk_keys=False,
            output=self._output,
        )
        return self._ask(question, explains=True)

    def line(
        self,
        text: str,
        *,
        default: str = "",
        remark: str = "",
        problem: Callable[[str], str | None],
        words: Sequence[str] = (),
    ) -> str | PromptRequest:
        """Let a line be typed.

        Args:
            text: The question.
            default: What an empty line means; shown behind the question.
            remark: Shown behind the question.
            problem: What is wrong with a line, or None; `?` alone always asks for the explanation.
            words: What the line can be completed to.
        """

        def accepts(answer: str) -> bool | str:
            return True if answer.strip() == "?" else printable(problem(answer.strip() or default) or "") or True

        shown = printable(" ".join(filter(None, [remark, f"[{default}]" if default else ""])))
        completer = WordCompleter([*words], match_middle=True, sentence=True) if words else None
        question = questionary.text(
            self._fitted(text, shown),
            instruction=f"{shown} " if shown else None,
            validate=accepts,
            validate_while_typing=False,
            completer=completer,
            output=self._output,
        )
        answer = self._ask(question, explains=False)
        return EXPLAIN if answer == "?" else answer or default

    def wrapped(self, text: str) -> str:
        """Return text for people in lines that fit the terminal, each further one indented as the first."""
        width = min(self._output.get_size().columns, _WIDEST)
        lines = text.splitlines()
        indents = [line[: len(line) - len(line.lstrip())] for line in lines]
        return "\n".join(
            textwrap.fill(line, width, subsequent_indent=indent)
            for line, indent in zip(lines, indents, strict=True)
        )

    def _fitted(self, text: str, instruction: str) -> str:
        """Return a question's text; what stands behind it begins a line where both do not fit into one."""
        text = printable(text)
        return text if len(text) + len(instruction) + _EDGE <= self._output.get_size().columns else f"{text}\n "

    def _ask(self, question: questionary.Question, *, explains: bool) -> str | PromptRequest:
        own = question.application.key_bindings
        question.application.key_bindings = merge_key_bindings([*([own] if own else []), _ways_out(explains)])
        question.application.ttimeoutlen = 0.05
        try:
            # Its own answer to a Ctrl-C loses one that comes just before it listens, or just after.
            answer = question.application.run(handle_sigint=False)
        except EOFError:
            raise KeyboardInterrupt from None
        return answer if isinstance(answer, PromptRequest) else str(answer).strip()

    def _shown(self, choice: Choice, mark: str) -> questionary.Choice:
        """Return the choice as a line that fits the terminal; what does not fit moves below the list."""
        width = min(self._output.get_size().columns, _WIDEST) - _EDGE
        title = f"{choice.title} ({mark})" if mark else choice.title
        below = choice.detail
        if choice.consequence and not choice.disabled:
            if len(title) + 3 + len(choice.consequence) <= width:
                title = f"{title} - {choice.consequence}"
            else:
                below = f"{choice.consequence}. {below}" if below else choice.consequence
        lines = textwrap.wrap(below, width - len("  Description: "))
        return questionary.Choice(
            one_line(title),
            choice.value,
            disabled=choice.disabled,
            description=printable("\n    ".join(lines)) or None,
        )


def _ways_out(explains: bool) -> KeyBindings:
    bindings = KeyBindings()

    def leave(wish: PromptRequest) -> Callable[[KeyPressEvent], None]:
        return lambda event: event.app.exit(result=wish)

    bindings.add(Keys.BackTab, eager=True)(leave(BACK))
    bindings.add(Keys.ControlB, eager=True)(leave(BACK))
    if explains:
        bindings.add("?", eager=True)(leave(EXPLAIN))
    return bindings


@dataclass(slots=True, kw_only=True)
class Conversation:
    """One conversation, about one file in the end.

    Attributes:
        state: Facts, what was set by key, and the answers so far.
        given: Answers that options gave, as typed; these are not asked.
        path: The file to be written.
        overwrite: Whether to start over when it exists, without asking.
        out: Where words go that are not a prompt.
        prompts: Who asks; a terminal when left out.
        edited: The text that is changed in place, or None for a new text.
    """

    state: WizardState
    given: Mapping[str, str]
    path: FilePath
    overwrite: bool
    out: UserMessages
    prompts: Prompts = field(default_factory=Prompts)
    edited: str | None = None

    def run(self) -> WizardResult:
        """Hold the conversation, until the user says to write.

        Raises:
            KeyboardInterrupt: The user left.
        """
        try:
            if self.path.exists() and not self.overwrite:
                self._ask_about_file()
            self._walk()
            while not self._more_settings():
                self._walk(len(QUESTIONS) - 1, step=-1)
            while not self._reviewed():
                pass
        except KeyboardInterrupt:
            self.out.say("Nothing was written.")
            raise
        return conclude(self.state, path=self.path, overwrite=self.path.exists(), edited=self.edited)

    def _ask_about_file(self) -> None:
        """Ask what to do about the file that is there."""
        values = self._values_of_file()
        unread = "it cannot be read" if values is None else None
        choices = (
            Choice(value="edit", title=f"Edit {self.path}", disabled=unread),
            Choice(value="new", title="Start over", consequence="replaces it when you choose to write"),
            Choice(value="other", title="Write to another file"),
        )
        while True:
            answer = self.prompts.select(f"{self.path} exists. What now?", choices)
            if answer == "other":
                name = self.prompts.line("Which file?", problem=_file_problem)
                if isinstance(name, str):
                    self.path = FilePath(name)
                    return
            elif isinstance(answer, str):
                break
        if answer == "edit" and values is not None:
            self.state = replace(self.state, base=values, editing=True)
            self.edited = self.path.read_text(encoding="utf-8")

    def _values_of_file(self) -> dict[KeyPath, Any] | None:
        try:
            return read_source(self.path)
        except ConfigError as error:
            self.out.say(str(error))
        return None

    def _walk(self, at: int = 0, *, step: int = 1, again: bool = True) -> None:
        """Go through the questions to the last, from number `at` on, first in the direction of `step`.

        With `again`, questions that have an answer are asked too, and the answer is offered.
        """
        while at < len(QUESTIONS):
            question = QUESTIONS[at]
            before = earlier(question, self.state)
            if self._needs_asking(question, before) and (again or question.name not in self.state.answers):
                answer = self._ask(question, before)
                step = -1 if isinstance(answer, PromptRequest) else 1
                if isinstance(answer, str):
                    self._store(question, answer)
            elif at == 0:
                step = 1
            at = max(0, at + step)
        self.state = drop_stale_answers(self.state)

    def _needs_asking(self, question: Question, before: WizardState) -> bool:
        """Return whether a question must be asked; else store its answer, or drop it when it does not matter."""
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
            self.state = self.state.answering(question.name, answer)
        return False

    def _forget_option(self, question: Question) -> None:
        self.given = {name: text for name, text in self.given.items() if name != question.name}

    def _store(self, question: Question, answer: str) -> None:
        self.state = self.state.answering(question.name, answer)
        if question is MODEL and answer and (model := self.state.run_facts.model):
            self.out.say(f"  {describe_model(model)}")

    def _ask(self, question: Question, before: WizardState) -> str | PromptRequest:
        """Ask until there is an answer the rules agree with, or the user wants to go back."""
        default = self.state.answers.get(question.name)
        if default is None or not question.is_answer(default, before):
            # A folder with weights that lies here is offered, never taken unseen.
            default = str(find_model(FilePath()) or "") if question is MODEL else question.proposed(before)
        while True:
            answer = self._prompt(question, before, default)
            if answer == EXPLAIN:
                self.out.say(self.prompts.wrapped(explanation(question)))
            elif isinstance(answer, PromptRequest):
                return answer
            elif problem := self._problem(question, before, answer):
                self.out.say(f"  {problem}")
            else:
                answer = question.accept(answer, before)
                if self._is_sure(question, before, answer):
                    return answer

    def _is_sure(self, question: Question, before: WizardState, answer: str) -> bool:
        """Ask again about an answer that something speaks against."""
        doubt = None if answer == question.proposed(before) else question.doubt(answer, before)
        choices = (Choice(value="no", title="No, another answer"), Choice(value="yes", title="Yes"))
        return doubt is None or self.prompts.select(f"{doubt}. Is that meant?", choices) == "yes"

    def _prompt(self, question: Question, before: WizardState, default: str) -> str | PromptRequest:
        choices = list(question.choices(before))
        if not choices:
            return self._line(question, before, question.words, default)
        if question.can_keep(before):
            in_file = [f"{path[-1]} {before.base[path]}" for path in question.keys if path in before.base]
            choices.insert(0, Choice(value=KEEP, title="As the file says", consequence=", ".join(in_file)))
        if default not in {choice.value for choice in choices}:
            # Something that was typed: offered as a choice of its own.
            choices.insert(0, Choice(value=default, title=default))
        marks = {question.proposed(before): "in the file" if before.editing else "suggested"}
        answer = self.prompts.select(question.words, choices, default=default, marks=marks)
        return self._line(question, before, question.typed, "") if answer == TYPE_IT else answer

    def _line(self, question: Question, before: WizardState, text: str, default: str) -> str | PromptRequest:
        return self.prompts.line(
            text,
            default=default,
            remark=question.remark(before),
            problem=lambda line: self._problem(question, before, line),
        )

    def _problem(self, question: Question, before: WizardState, line: str) -> str | None:
        """Return what is wrong with a line: not an answer, or against a rule that no later answer satisfies."""
        try:
            answer = question.accept(line, before)
        except UsageError:
            raise
        except ValueError as error:
            return str(error)
        return broken_rule(question, before.answering(question.name, answer))

    def _more_settings(self) -> bool:
        """Let any further key be set; False when the last question is wanted again."""
        settings = dict(self.state.settings)
        so_far = ", ".join(f"{path[-1]} {_shown(path, value)}" for path, value in settings.items())
        choices = (
            Choice(value="no", title="No", consequence=so_far and f"set so far: {so_far}"),
            Choice(value="yes", title="Yes, choose from all keys"),
        )
        while (first := self.prompts.select("Any other setting?", choices, default="no")) != "no":
            if first == BACK:
                return False
            if first == EXPLAIN:
                text = "Every key that no question above decides; fsdplaunch config explain KEY describes one."
                self.out.say(f"  {text}")
                continue
            while isinstance(spec := self._ask_for_key(), KeySpec):
                now = (compose(self.state) | settings).get(spec.path, spec.default)
                self.out.say(self.prompts.wrapped(f"  {spec.key.text} Now: {_shown(spec.path, now)}"))
                answer = self._ask_value(spec)
                if isinstance(answer, str):
                    settings[spec.path] = read_setting(spec, answer)
            if spec is None:
                break
        self.state = replace(self.state, settings=settings)
        return True

    def _ask_for_key(self) -> KeySpec | PromptRequest | None:
        """Ask which key is to be set; None when no further one is."""
        keys = {spec.dotted: spec for spec in further_keys(self.state)}

        def named(text: str) -> list[str]:
            exact = [name for name, spec in keys.items() if text in (name, spec.name)]
            return exact or [name for name in keys if text in name]

        def problem(text: str) -> str | None:
            found = named(text) if text else []
            if text and not found:
                near = closest(text, [spec.name for spec in keys.values()])
                return f"no key has {text} in its name" + (f"; is {near[0]} meant?" if near else "")
            return f"{len(found)} keys have it in their names, such as {found[0]}" if len(found) > 1 else None

        remark = "(a part of its name, Tab completes; Enter: that is all)"
        name = self.prompts.line("Which key?", remark=remark, problem=problem, words=[*keys])
        if isinstance(name, str):
            return keys[named(name)[0]] if name else None
        return name

    def _ask_value(self, spec: KeySpec) -> str | PromptRequest:
        """Ask for a key's value, straight from the schema: a choice of its names, or a line."""

        def problem(text: str) -> str | None:
            try:
                read_setting(spec, text)
            except ValueError as error:
                return str(error)
            return None

        kind = spec.key.kind
        names = kind.choices or (("true", "false") if isinstance(spec.default, bool) else ())
        if not names:
            return self.prompts.line(f"{spec.dotted}:", remark=f"({kind.expects})", problem=problem)
        choices = [*(Choice(value=name, title=name) for name in names), Choice(value="", title="not set")]
        return self.prompts.select(spec.dotted, choices, default=names[0])

    def _reviewed(self) -> bool:
        """Show what would be written and ask; True when it is to be written."""
        old = self.path.read_text(encoding="utf-8", errors="replace") if self.path.exists() else None
        problems = find_problems(self.state)
        for line in (
            "",
            preview(old, new_text(self.state, self.edited), self.path),
            *remarks(self.state),
            *map(str, problems),
        ):
            self.out.say(line)
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
        answers = {one.name: one for one in QUESTIONS if one.name in self.state.answers}
        choices = [
            Choice(value=name, title=question.words, consequence=self.state.answers[name] or "-")
            for name, question in answers.items()
        ]
        chosen = self.prompts.select("Which answer?", [*choices, Choice(value="set", title="Any other key")])
        if chosen == "set":
            self._more_settings()
        question = answers.get(chosen) if isinstance(chosen, str) else None
        answer = BACK if question is None else self._ask(question, earlier(question, self.state))
        if question is not None and isinstance(answer, str):
            self._forget_option(question)
            self.state = drop_stale_answers(self.state.answering(question.name, answer))
            self._walk(again=False)


def explanation(question: Question) -> str:
    """Return what a question decides, in the words of the schema."""
    keys = [keys_by_path()[path] for path in question.keys]
    lines = [f"  {question.help}", *(f"  {spec.dotted}: {spec.key.text}" for spec in keys)]
    return "\n".join([*lines, f"  On the command line: {question.flag} {question.metavar}"])


def further_keys(state: WizardState) -> tuple[KeySpec, ...]:
    """Return the keys that no question decides and that have a meaning in the version that is written."""
    decided = {path for question in QUESTIONS for path in question.keys}
    return tuple(
        spec
        for spec in all_keys()
        if spec.path not in decided
        and not spec.key.unread
        and (state.version in spec.key.versions or spec.path == VERSION)
    )


def read_setting(spec: KeySpec, text: str) -> Any:
    """Return the canonical value of a key; None for an empty text, which takes the key back.

    Args:
        spec: The key.
        text: As `--set` takes it.

    Raises:
        ValueError: It is none of the key's values.
    """
    layer = flag_layer([f"{spec.dotted}={text}"])
    if layer.problems:
        problem = layer.problems[0]
        raise ValueError(problem.message + (f" ({problem.hint})" if problem.hint else ""))
    return layer.values[spec.path].value


def _shown(path: KeyPath, value: Any) -> str:
    return "not set" if value in (None, (), {}) else keys_by_path()[path].key.kind.write(value)


def _endings(path: FilePath, problems: int) -> Sequence[Choice]:
    wrong = f"{problems} problem" + ("s" if problems > 1 else "") if problems else None
    return (
        Choice(value="write", title=f"Write {path}", disabled=wrong),
        Choice(value="change", title="Change an answer"),
        Choice(value="all", title="Show every key"),
        Choice(value="cancel", title="Cancel: write nothing"),
    )


def _file_problem(text: str) -> str | None:
    path = FilePath(text.strip())
    if not text.strip():
        return "must be a file's name"
    if path.exists():
        return f"{path} exists too"
    return None if path.absolute().parent.is_dir() else f"{path.parent} is not a folder"
