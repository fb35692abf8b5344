"""The last question: any key of the schema, found by typing a part of its name."""

from collections.abc import Callable, Mapping
from typing import Any

from fsdplaunch.config.load.flag_layer import flag_layer
from fsdplaunch.config.schema.walk import KeySpec, Path, all_keys, keys_by_path
from fsdplaunch.wizard.compose import compose
from fsdplaunch.wizard.prompts import EXPLAIN, PromptRequest, Prompts
from fsdplaunch.wizard.questions.all import QUESTIONS
from fsdplaunch.wizard.questions.question import Choice
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
) -> dict[Path, Any] | PromptRequest:
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


def _first_choices(settings: Mapping[Path, Any]) -> tuple[Choice, ...]:
    so_far = ", ".join(f"{path[-1]} {_shown(path, value)}" for path, value in settings.items())
    return (
        Choice(value="no", title="No", consequence=so_far and f"set so far: {so_far}"),
        Choice(value="yes", title="Yes, choose from all keys"),
    )


def _key_choices(state: WizardState, settings: Mapping[Path, Any]) -> list[Choice]:
    values = compose(state) | dict(settings)
    choices = [Choice(value=_DONE, title="That is all")]
    for spec in further_keys(state):
        value = values.get(spec.path, spec.default)
        now = _shown(spec.path, value)
        choices.append(Choice(value=spec.dotted, title=spec.dotted, consequence=now, detail=spec.key.text))
    return choices


def _shown(path: Path, value: Any) -> str:
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
