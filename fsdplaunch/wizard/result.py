"""What the wizard comes to: the text to write, and the notes about it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath

from fsdplaunch.config.schema.config import Config
from fsdplaunch.config.schema.walk import build_config, keys_by_path, value_at
from fsdplaunch.config.write.render import render
from fsdplaunch.config.write.yaml_edit import set_keys
from fsdplaunch.errors import UsageError
from fsdplaunch.wizard.compose import compose
from fsdplaunch.wizard.review import repeat_command
from fsdplaunch.wizard.state import WizardState


@dataclass(frozen=True, slots=True, kw_only=True)
class WizardResult:
    """What the wizard came to.

    Attributes:
        path: The file to write; not always the given one, the user may have named another.
        text: Its whole text.
        config: What it says, not resolved.
        answers: Every answer by question name.
        reasons: Why a suggested value is what it is, by dotted key.
        notes: What the reader should know and no key can say.
        command: The command that writes the same file without questions.
    """

    path: FilePath
    text: str
    config: Config
    answers: Mapping[str, str]
    reasons: Mapping[str, str]
    notes: tuple[str, ...]
    command: str


def conclude(
    state: WizardState, *, path: FilePath, overwrite: bool = False, edited: str | None = None
) -> WizardResult:
    """Return the result of a situation with every answer.

    Args:
        state: With every answer.
        path: The file to write.
        overwrite: Whether the command that repeats it must replace a file.
        edited: The text of the file that is changed in place; None for a new text.
    """
    values, suggestion = compose(state), state.suggestion
    taken = [pin for pin in suggestion.pins if pin in values and values[pin] == value_at(suggestion.config, pin)]
    return WizardResult(
        path=path,
        text=new_text(state, edited),
        config=build_config(values),
        answers=dict(state.answers),
        reasons={".".join(pin): suggestion.reasons[".".join(pin)] for pin in taken},
        notes=tuple(note for note in suggestion.notes if note not in state.facts.hardware.notes),
        command=repeat_command(state, path, overwrite=overwrite),
    )


def new_text(state: WizardState, edited: str | None) -> str:
    """Return the text to write: the edited file with only its changed keys touched, else a new one.

    Args:
        state: With every answer.
        edited: The text of the file that is changed in place, or None.
    """
    values = compose(state)
    if edited is None:
        return render(build_config(values))
    changes = [
        (spec, values.get(path))
        for path, spec in keys_by_path().items()
        if values.get(path) != state.base.get(path)
    ]
    try:
        return set_keys(edited, changes)
    except UsageError:
        return render(build_config(values))  # values shared through anchors: the text cannot be kept
