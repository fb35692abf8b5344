"""`fsdplaunch config`: find out what the file shall say, by asking or from options, and write it."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fsdplaunch.cli.output import Output
from fsdplaunch.config.load.load import DEFAULT_FILE, read_file, stack
from fsdplaunch.config.write.presets import find_preset, preset_folder
from fsdplaunch.config.write.render import write_text_atomically
from fsdplaunch.errors import UsageError


def write_config(
    *,
    output: Path | None,
    answers: Mapping[str, str | None],
    overrides: Sequence[str],
    preset: str | None,
    source: Path | None,
    yes: bool,
    no_input: bool,
    overwrite: bool,
    as_json: bool,
    out: Output,
) -> int:
    """Write a configuration file, asking for what options do not say.

    Raises:
        LaunchError: Nothing was written.
        KeyboardInterrupt: The user left; nothing was written.
    """
    from fsdplaunch.wizard.review import closing_words
    from fsdplaunch.wizard.run import describe_facts, read_facts, run_wizard

    start_from = starting_point(preset, source)
    if source is not None:
        tell_ineffective_keys(source, out)
    facts = read_facts(os.environ)
    out.say(describe_facts(facts))
    result = run_wizard(
        facts=facts,
        out=out,
        path=output or Path(DEFAULT_FILE),
        answers={name: text for name, text in answers.items() if text is not None},
        overrides=overrides,
        start_from=start_from,
        interactive=can_ask(no_input=no_input or as_json),
        yes=yes,
        overwrite=overwrite,
    )
    write_text_atomically(result.path, result.text)
    for key, reason in result.reasons.items():
        out.say(out.dim(f"  {key}: {reason}"))
    for note in result.notes:
        out.note(note)
    if as_json:
        out.json({"path": str(result.path), "answers": dict(result.answers), "notes": list(result.notes)})
    out.say(closing_words(result.path, result.command))
    return 0


def starting_point(preset: str | None, source: Path | None) -> Path | None:
    """Return the file whose values are offered first: a preset's, another one, or none.

    Raises:
        UsageError: Both are named, or there is no such preset.
    """
    if preset is not None and source is not None:
        msg = "--preset and --from both name where to start"
        raise UsageError(msg, hint="give one of them")
    return preset_folder() / f"{find_preset(preset).name}.yaml" if preset is not None else source


def tell_ineffective_keys(source: Path, out: Output) -> None:
    """Name every key of an accelerate file that `accelerate launch` ignores; from now on it takes effect."""
    from fsdplaunch.config.write.to_accelerate import keys_ignored_by_accelerate

    for line in keys_ignored_by_accelerate(stack(read_file(source, Path.cwd()), path=source)):
        out.note(f"{source}: without effect under accelerate launch: {line}")


def can_ask(*, no_input: bool) -> bool:
    """Tell whether there is a person to ask."""
    forbidden = no_input or os.environ.get("FSDPLAUNCH_NO_INPUT") or os.environ.get("CI")
    return not forbidden and sys.stdin.isatty() and sys.stderr.isatty()
