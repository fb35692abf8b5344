"""The conversation: an existing file, each question that matters, any further key, what would be written.

The only importer of questionary. Prompts are drawn on stderr, so that stdout stays free for data; each can be left
backwards (Shift-Tab or Ctrl-B) and asked for an explanation (`?`). Nothing is written here. Leaving with Ctrl-C,
Ctrl-D or Cancel raises KeyboardInterrupt.
"""

import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from pathlib import Path as FilePath

import questionary
from prompt_toolkit import print_formatted_text
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.key_binding import KeyBindings, merge_key_bindings
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import Output, create_output
from questionary.constants import DEFAULT_STYLE

from fsdplaunch.config.layers import read_assignments
from fsdplaunch.config.load import check
from fsdplaunch.config.names import key_named
from fsdplaunch.config.problems import ConfigError
from fsdplaunch.config.render import render
from fsdplaunch.config.schema.config import KeySpec, all_keys, build_config, keys_by_path
from fsdplaunch.display_text import counted, one_line, printable
from fsdplaunch.errors import UsageError
from fsdplaunch.probe.model_files import find_model
from fsdplaunch.wizard.answers import (
    WizardResult,
    answer_automatically,
    broken_rule,
    compose,
    conclude,
    drop_stale_answers,
    earlier,
    new_text,
    preview,
    read_source,
    remarks,
)
from fsdplaunch.wizard.questions import KEEP, MODEL, QUESTIONS, TYPE_IT, Choice, Question
from fsdplaunch.wizard.state import WizardState

HOW_TO = "(Shift-Tab: back, ?: explain)"
_EDGE, _WIDEST = 8, 100


class PromptRequest(Enum):
    """Something else than an answer that a prompt was left with."""

    BACK = "back"
    EXPLAIN = "explain"


class Prompts:
    """Asks on a terminal, the one behind stderr unless told where to draw."""

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
        """Let one of the choices be chosen; the cursor starts at `default`, `marks` stand behind titles."""
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
        answer = self._ask(question, explains=True)
        self._keep(text, next((choice.title for choice in choices if choice.value == answer), None))
        return answer

    def line(
        self,
        text: str,
        *,
        default: str = "",
        remark: str = "",
        problem: Callable[[str], str | None],  # what is wrong with a line
        words: Sequence[str] = (),  # what the line can be completed to
    ) -> str | PromptRequest:
        """Let a line be typed; an empty one means `default`, `?` alone always asks for the explanation."""

        def accepts(answer: str) -> bool | str:
            wrong = None if answer.strip() == "?" else problem(answer.strip() or default)
            return self.wrapped(printable(wrong)) if wrong else True

        shown = printable(" ".join(filter(None, [remark, f"[{default}]" if default else ""])))
        shown = textwrap.fill(shown, self._width, initial_indent=" " * 2, subsequent_indent=" " * 3)[2:]
        completer = WordCompleter([*words], match_middle=True, sentence=True) if words else None
        question = questionary.text(
            self._fitted(text, shown),
            instruction=f"{shown} " if shown else None,
            validate=accepts,
            validate_while_typing=False,
            completer=completer,
            output=self._output,
        )
        for window in question.application.layout.find_all_windows():
            window.height = None  # a problem may need more lines than the one that prompt_toolkit has for it
        answer = self._ask(question, explains=False)
        if answer == "?":
            return PromptRequest.EXPLAIN
        self._keep(text, None if answer == PromptRequest.BACK else str(answer or default or "none"))
        return answer or default

    @property
    def _width(self) -> int:
        return min(self._output.get_size().columns, _WIDEST)

    def wrapped(self, text: str) -> str:
        """Return text in lines of whole words, each further one indented, or a comment, as the first."""
        lines = [(line, line[: len(line) - len(line.lstrip(" +#"))]) for line in text.splitlines()]
        fill = partial(textwrap.fill, width=self._width, break_on_hyphens=False)
        return "\n".join(fill(line, subsequent_indent=start) for line, start in lines)

    def _keep(self, text: str, answer: str | None) -> None:
        """Leave a question and its answer on the screen; nothing of one that was left without."""
        if answer is None:
            return
        text, answer = printable(text), printable(answer)
        if len(f"? {text} {answer}") > self._width:
            answer = "\n" + textwrap.fill(answer, self._width, initial_indent=" " * 3, subsequent_indent=" " * 3)
        words = [("class:qmark", "?"), ("class:question", f" {text} "), ("class:answer", answer)]
        print_formatted_text(FormattedText(words), style=DEFAULT_STYLE, output=self._output)

    def _fitted(self, text: str, instruction: str) -> str:
        """Return a question's text; what stands behind it begins a line where both do not fit into one."""
        text = printable(text)
        return text if len(text) + len(instruction) + _EDGE <= self._output.get_size().columns else f"{text}\n "

    def _ask(self, question: questionary.Question, *, explains: bool) -> str | PromptRequest:
        own, more = question.application.key_bindings, KeyBindings()
        wishes = {Keys.BackTab: PromptRequest.BACK, Keys.ControlB: PromptRequest.BACK}
        for key, wish in (wishes | ({"?": PromptRequest.EXPLAIN} if explains else {})).items():
            more.add(key, eager=True)(lambda event, wish=wish: event.app.exit(result=wish))
        question.application.key_bindings = merge_key_bindings([*([own] if own else []), more])
        question.application.ttimeoutlen = 0.05
        question.application.erase_when_done = True  # what stays is `_keep`'s, in whole words
        try:
            # Its own answer to a Ctrl-C loses one that comes just before it listens, or just after.
            answer = question.application.run(handle_sigint=False)
        except EOFError:
            raise KeyboardInterrupt from None
        return answer if isinstance(answer, PromptRequest) else str(answer).strip()

    def _shown(self, choice: Choice, mark: str) -> questionary.Choice:
        """Return the choice as a line that fits the terminal; what does not fit moves below the list."""
        width = self._width - _EDGE
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


@dataclass(slots=True, kw_only=True)
class Conversation:
    """One conversation, about one file in the end."""

    state: WizardState  # facts, what was set by key, and the answers so far
    given: Mapping[str, str]  # answers that options gave, as typed; these are not asked
    path: FilePath  # the file to be written
    overwrite: bool  # whether to start over when it exists, without asking
    say: Callable[[str], None]  # prints words that are not a prompt
    prompts: Prompts = field(default_factory=Prompts)  # who asks; a terminal when left out
    edited: str | None = None  # the text that is changed in place, or None for a new text

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
            self._say("Nothing was written.")
            raise
        return conclude(self.state, path=self.path, overwrite=self.path.exists(), edited=self.edited)

    def _say(self, text: str) -> None:
        self.say(self.prompts.wrapped(text))

    def _ask_about_file(self) -> None:
        try:
            values, unread = read_source(self.path), None
        except ConfigError as error:
            self._say(str(error))
            values, unread = {}, "it cannot be read"
        choices = (
            Choice("edit", f"Edit {self.path}", disabled=unread),
            Choice("new", "Start over", "replaces it when you choose to write"),
            Choice("other", "Write to another file"),
        )
        answer: str | PromptRequest = PromptRequest.BACK
        while isinstance(answer, PromptRequest):
            answer = self.prompts.select(f"{self.path} exists. What now?", choices)
            if answer == "other":
                answer = self.prompts.line("Which file?", problem=_file_problem)
                self.path = FilePath(answer) if isinstance(answer, str) else self.path
            elif answer == "edit":
                self.state = replace(self.state, base=values, editing=True)
                self.edited = self.path.read_text(encoding="utf-8")

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
                    self.state = self.state.answering(question.name, answer)
                    if question is MODEL and answer and (model := self.state.run_facts.model):
                        self._say(f"  {model.sizes.words}")
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
            self._say(f"  {error.message}")
            self.given = {name: text for name, text in self.given.items() if name != question.name}
            return True
        if after is None:
            return True
        answer = after.answers.get(question.name)
        left = self.state.without(question.name)
        self.state = left if answer is None else left.answering(question.name, answer)
        return False

    def _ask(self, question: Question, before: WizardState) -> str | PromptRequest:
        default = self.state.answers.get(question.name)
        if default is None or not question.is_answer(default, before):
            # A folder with weights that lies here is offered, never taken unseen.
            default = str(find_model(FilePath()) or "") if question is MODEL else question.proposed(before)
        while True:
            answer = self._prompt(question, before, default)
            if answer == PromptRequest.EXPLAIN:
                self._say(explanation(question))
            elif isinstance(answer, PromptRequest):
                return answer
            elif problem := self._problem(question, before, answer):
                self._say(f"  {problem}")
            else:
                answer = question.accept(answer, before)
                doubt = None if answer == question.proposed(before) else question.doubt(answer, before)
                choices = (Choice("no", "No, another answer"), Choice("yes", "Yes"))
                if doubt is None or self.prompts.select(f"{doubt}. Is that intended?", choices) == "yes":
                    return answer

    def _prompt(self, question: Question, before: WizardState, default: str) -> str | PromptRequest:
        choices, words = list(question.choices(before)), question.words
        if choices:
            if question.can_keep(before):
                in_file = [f"{path[-1]} {before.base[path]}" for path in question.keys if path in before.base]
                choices.insert(0, Choice(KEEP, "As the file says", ", ".join(in_file)))
            if default not in {choice.value for choice in choices}:
                # Something that was typed: offered as a choice of its own.
                choices.insert(0, Choice(default, default))
            marks = {question.proposed(before): "in the file" if before.editing else "suggested"}
            answer = self.prompts.select(words, choices, default=default, marks=marks)
            if answer != TYPE_IT:
                return answer
            words, default = f"{words} {question.metavar}", ""
        remark = question.remark(before)
        return self.prompts.line(
            words, default=default, remark=remark, problem=lambda line: self._problem(question, before, line)
        )

    def _problem(self, question: Question, before: WizardState, line: str) -> str | None:
        try:
            answer = question.accept(line, before)
        except ValueError as error:
            return str(error)
        return broken_rule(question, before.answering(question.name, answer))

    def _more_settings(self) -> bool:
        """Take any further keys, one KEY=VALUE a line; False when the last question is wanted again."""

        def problem(text: str) -> str | None:
            if not text or ("=" not in text and isinstance(key_named(text), KeySpec)):
                return None
            try:
                read_assignments([text])
            except ConfigError as error:
                first = error.problems[0]
                return ": ".join(filter(None, [first.key, first.message, first.hint]))
            return None

        remark = "(KEY=VALUE; KEY alone explains it; Tab completes; Enter: no)"
        words = [f"{spec.dotted}=" for spec in all_keys() if self.state.version in spec.key.versions]
        while answer := self.prompts.line("Any other setting?", remark=remark, problem=problem, words=words):
            spec = key_named(answer) if isinstance(answer, str) and "=" not in answer else None
            if answer == PromptRequest.BACK:
                return False
            if isinstance(answer, PromptRequest):
                self._say("  Every key that no question decides; fsdplaunch config explain lists them.")
            elif isinstance(spec, KeySpec):
                self._say(f"  {spec.dotted}: {spec.key.text} It must be {spec.key.kind.expects}.")
            else:
                changes = {spec.path: value for spec, value in read_assignments([answer])}
                self.state = replace(self.state, settings={**self.state.settings, **changes})
        return True

    def _reviewed(self) -> bool:
        old = self.path.read_text(encoding="utf-8", errors="replace") if self.path.exists() else None
        problems = check(build_config(compose(self.state)))
        shown = preview(old, new_text(self.state, self.edited), self.path)
        for line in ("", shown, *remarks(self.state), *map(str, problems)):
            self._say(line)
        wrong = counted(len(problems), "problem") if problems else None
        endings = (
            Choice("write", f"Write {self.path}", disabled=wrong),
            Choice("change", "Change an answer"),
            Choice("all", "Show every key"),
            Choice("cancel", "Cancel: write nothing"),
        )
        answer = self.prompts.select("Write it?", endings, default="write")
        if answer == "cancel":
            raise KeyboardInterrupt
        if answer in ("change", PromptRequest.BACK):
            self._change_one()
        elif answer == "all":
            self._say(render(build_config(compose(self.state)), full=True))
        elif answer == PromptRequest.EXPLAIN:
            self._say("  Until you choose to write, nothing on disk changes.")
        return answer == "write"

    def _change_one(self) -> None:
        answers = {one.name: one for one in QUESTIONS if one.name in self.state.answers}
        choices = [
            Choice(name, question.words, self.state.answers[name] or "-") for name, question in answers.items()
        ]
        chosen = self.prompts.select("Which answer?", [*choices, Choice("set", "Any other key")])
        if chosen == "set":
            self._more_settings()
        elif isinstance(chosen, str):
            question = answers[chosen]
            answer = self._ask(question, earlier(question, self.state))
            if isinstance(answer, str):
                self.given = {name: text for name, text in self.given.items() if name != question.name}
                self.state = drop_stale_answers(self.state.answering(question.name, answer))
                self._walk(again=False)


def explanation(question: Question) -> str:
    """Return what a question decides, in the words of the schema."""
    keys = [keys_by_path()[path] for path in question.keys]
    lines = [f"  {question.help}", *(f"  {spec.dotted}: {spec.key.text}" for spec in keys)]
    return "\n".join([*lines, f"  On the command line: {question.flag} {question.metavar}"])


def _file_problem(text: str) -> str | None:
    path = FilePath(text.strip())
    if not text.strip():
        return "must be a file's name"
    if path.exists():
        return f"{path} exists too"
    return None if path.absolute().parent.is_dir() else f"{path.parent} is not a folder"
