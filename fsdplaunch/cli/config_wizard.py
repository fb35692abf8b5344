"""`fsdplaunch config`: find out what the file shall say, by asking or from options, and write it."""

import os
import shlex
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
    script: str | None = None,
) -> int:
    """Write a configuration file, asking for what options do not say; then offer to measure a script with it.

    Raises:
        LaunchError: Nothing was written.
        KeyboardInterrupt: The user left; nothing was written.
    """
    from fsdplaunch.wizard.review import closing_words
    from fsdplaunch.wizard.run import describe_facts, read_facts, run_wizard

    words = script_words(script)
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
    if words and not yes and can_ask(no_input=no_input or as_json):
        return _offer_to_measure(words, result.path, out)
    return 0


def script_words(text: str | None) -> list[str]:
    """Return `--script`'s script and its arguments; none where it was left out.

    Raises:
        UsageError: It is no command line, or there is no such script.
    """
    from fsdplaunch.cli.launch.single_node import check_script

    try:
        words = shlex.split(text or "")
    except ValueError as error:
        msg = f"--script {text!r}: {str(error).lower()}"
        raise UsageError(msg, hint="write it as --script 'train.py --lr 3e-4'") from error
    if words:
        check_script(words[0])
    return words


def _offer_to_measure(words: Sequence[str], path: Path, out: Output) -> int:
    """Ask whether to measure the script now, and do; the file that was written then says what was best."""
    from fsdplaunch.wizard.prompts import Prompts
    from fsdplaunch.wizard.questions.question import Choice

    choices = [
        Choice(value="yes", title="Yes", consequence=f"fsdplaunch tune; {path} then says what was fastest"),
        Choice(value="no", title="No", consequence="at any time: fsdplaunch tune"),
    ]
    try:
        answer = Prompts().select(f"Measure {words[0]}? About 3 minutes.", choices, default="no")
    except KeyboardInterrupt:
        return 0
    if answer != "yes":
        return 0
    from fsdplaunch.cli.tune.command import tune
    from fsdplaunch.cli.tune.report import TuneOutputs
    from fsdplaunch.cli.tune.request import TuneRequest

    request = TuneRequest(script=words[0], arguments=tuple(words[1:]), file=str(path))
    return tune(request, resume=None, outputs=TuneOutputs(write=path, overwrite=True), out=out)


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
