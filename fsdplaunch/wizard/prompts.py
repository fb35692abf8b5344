"""One prompt at a time on a terminal. The only importer of questionary.

Prompts are drawn on stderr, so that stdout stays free for data. Every prompt can be left backwards (Shift-Tab or
Ctrl-B) and asked for an explanation (`?`); Ctrl-C and Ctrl-D raise KeyboardInterrupt.
"""

import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import questionary
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent, merge_key_bindings
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import Output, create_output

from fsdplaunch.display_text import one_line, printable
from fsdplaunch.wizard.question import Choice

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
        filtered: bool = False,
    ) -> str | PromptRequest:
        """Let one of the choices be chosen.

        Args:
            text: The question.
            choices: At least one of them not disabled.
            default: Where the cursor starts.
            marks: Words behind a choice's title, by its value.
            filtered: Whether typing narrows the list.
        """
        shown = [self._shown(choice, (marks or {}).get(choice.value, "")) for choice in choices]
        start = next((choice for choice in shown if choice.value == default and not choice.disabled), None)
        how = "(type to search, Shift-Tab: back)" if filtered else HOW_TO
        question = questionary.select(
            printable(text),
            shown,
            default=start,
            instruction=how,
            use_search_filter=filtered,
            use_jk_keys=False,
            output=self._output,
        )
        return self._ask(question, explains=not filtered)

    def line(
        self, text: str, *, default: str = "", remark: str = "", problem: Callable[[str], str | None]
    ) -> str | PromptRequest:
        """Let a line be typed.

        Args:
            text: The question.
            default: What already stands there.
            remark: Shown behind the question.
            problem: What is wrong with a line, or None; `?` alone always asks for the explanation.
        """

        def accepts(answer: str) -> bool | str:
            return True if answer.strip() == "?" else printable(problem(answer) or "") or True

        question = questionary.text(
            printable(text),
            default=default,
            instruction=printable(remark) or None,
            validate=accepts,
            validate_while_typing=False,
            output=self._output,
        )
        answer = self._ask(question, explains=False)
        return EXPLAIN if answer == "?" else answer

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
