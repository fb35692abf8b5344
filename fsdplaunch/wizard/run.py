"""Run the wizard: facts and answers -> the text of a file. The caller writes it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path as FilePath

from fsdplaunch.config.layers import read_assignments
from fsdplaunch.config.load import DEFAULT_FILE, check
from fsdplaunch.config.problems import ConfigError
from fsdplaunch.config.schema.config import build_config
from fsdplaunch.errors import UsageError
from fsdplaunch.probe.hardware import count_tpu_chips, describe_hardware, read_hardware
from fsdplaunch.probe.scheduler import describe_cluster, read_cluster
from fsdplaunch.wizard.answers import WizardResult, answer_all, compose, conclude, read_source
from fsdplaunch.wizard.state import SuggestionFacts, WizardState


def run_wizard(
    *,
    facts: SuggestionFacts,
    say: Callable[[str], None],
    path: FilePath = FilePath(DEFAULT_FILE),
    answers: Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
    start_from: FilePath | None = None,
    interactive: bool,
    yes: bool = False,
    overwrite: bool = False,
) -> WizardResult:
    """Find out what the file at `path` shall say. Writes nothing; `say` prints words that are not a prompt.

    Options gave `answers` by question name, and `overrides` win over every answer; `start_from` is a file whose
    values are the first offers. Where not `interactive`, nothing ever prompts, and `yes` takes every suggestion.
    An existing file may be replaced with `overwrite` only.

    Raises:
        UsageError: An answer is none, has no meaning, or is missing and not safe to guess; or the file exists.
        ConfigError: The answers contradict a rule, or a key in `overrides` is wrong.
        KeyboardInterrupt: The user left.
    """
    given = dict(answers or {})
    source = read_source(start_from) if start_from else None
    settings = {spec.path: value for spec, value in read_assignments(overrides)}
    state = WizardState(facts=facts, settings=settings, base=source or {}, editing=source is not None)
    if interactive and not yes:
        from fsdplaunch.wizard.conversation import Conversation  # imports questionary, 100 ms

        return Conversation(state=state, given=given, path=path, overwrite=overwrite, say=say).run()
    if path.exists() and not overwrite:
        msg = f"{path} exists"
        raise UsageError(msg, hint="--overwrite replaces it, --output FILE writes another one")
    state = answer_all(state, given, yes=yes)
    if problems := check(build_config(compose(state))):
        raise ConfigError(problems)
    return conclude(state, path=path, overwrite=overwrite)


def read_facts(environ: Mapping[str, str]) -> SuggestionFacts:
    """Look at this machine and, in the process's variables, at the job it runs in."""
    hardware = read_hardware(environ)
    on_tpus = not hardware.gpus and count_tpu_chips() > 0
    return SuggestionFacts(hardware=hardware, cluster=read_cluster(environ), on_tpus=on_tpus)


def describe_facts(facts: SuggestionFacts) -> str:
    """Return what was found, one line per thing."""
    lines = [("This machine", describe_hardware(facts.hardware))]
    job = describe_cluster(facts.cluster)
    lines += [("Job", job)] if job else []
    lines += [("Note", note) for note in facts.hardware.notes]
    return "\n".join(f"{name:<14}{text}" for name, text in lines)
