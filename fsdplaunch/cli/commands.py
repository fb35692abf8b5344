"""Every command: its options, their help, and the function that does it.

A command's options are declared here once. The function that does it is named beside them, imported when the
command is called, and gets the options by their names, so `fsdplaunch --help` takes tens of milliseconds.
"""

from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Annotated

import typer
import typer.models
from typer import Argument, Option

from fsdplaunch import __version__
from fsdplaunch.cli.options import (
    ASSIGNMENTS,
    ConfigOption,
    JsonOption,
    LogDirOption,
    ModuleOption,
    NotedOption,
    OverwriteOption,
    RunArgument,
    ScriptToTry,
    SetOption,
    age,
    both_ways,
    completed,
    does,
    flag,
    group,
    keys_and_sections,
    number,
    presets,
    script_argument,
    size,
    takes,
    whole,
)
from fsdplaunch.cli.output import Output

# What follows SCRIPT belongs to the script.
SCRIPT_SETTINGS = {"allow_extra_args": True, "allow_interspersed_args": False}
CHECK_STEPS = "Optimizer steps after which the script is stopped; 2, or 5 with --compare"
CHECK_EPILOG = (
    "Example: fsdplaunch check train.py --lr 3e-4. Keys are options before SCRIPT, as for launch (--hide-ranks); "
    "everything after it belongs to the script."
)


def _print_version(wanted: bool) -> None:
    if wanted:
        Output().data(f"fsdplaunch {__version__}")
        raise typer.Exit


def _print_all_options(wanted: bool) -> None:
    if wanted:
        from fsdplaunch.cli.key_options import list_options

        Output().data(list_options())
        raise typer.Exit


app = group(
    "Launch, shard, checkpoint and merge PyTorch FSDP training.",
    name="fsdplaunch",
    epilog="Start: fsdplaunch config, then fsdplaunch launch train.py",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = group("Write, show, check and convert the configuration file.")
runs_app = group("List, show, compare, cancel and delete runs, and print their output.")
app.add_typer(config_app, name="config")
app.add_typer(runs_app, name="runs")


@app.callback()
def root(
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version")
    ] = False,
) -> None:
    """Take the options before any command, which a Ctrl-C does not end before it has cleared up."""
    import signal

    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # so `main` has it until here
        signal.signal(signal.SIGINT, signal.default_int_handler)


@does("config:convert", app, "to-fsdp2", hidden=True, fixed={"to": "fsdp2"})
def to_fsdp2(
    source: Annotated[Path, Option("--config-file", "--config_file")],
    target: Annotated[Path | None, Option("--output-file", "--output_file")] = None,
    overwrite: OverwriteOption = False,
) -> None:
    """Convert a file to FSDP2: what accelerate calls to-fsdp2."""


@does(
    "early_launch:launch_script",
    app,
    "launch",
    epilog="Examples: fsdplaunch launch train.py --lr 3e-4; fsdplaunch launch --dry-run train.py; "
    "fsdplaunch launch --set fsdp_sharding_strategy=SHARD_GRAD_OP train.py. "
    "Every key is an option before SCRIPT (--help-all): --num-processes 4, --keep-global-batch, --hide-ranks, "
    "--shard off. Everything after SCRIPT belongs to the script.",
    context_settings=SCRIPT_SETTINGS,
)
def launch(
    context: typer.Context,
    script: Annotated[str | None, script_argument("Script to run on every rank, and its arguments")] = None,
    file: ConfigOption = None,
    overrides: SetOption = None,
    module: ModuleOption = False,
    dry_run: Annotated[bool, flag("--dry-run", "Print the environment and the command; start nothing")] = False,
    show_all: Annotated[bool, flag("--all", "With --dry-run: also variables that hold defaults")] = False,
    check_only: Annotated[bool, flag("--check-only", "Check that this machine can run it; start nothing")] = False,
    no_python: Annotated[bool, both_ways("--no-python", "SCRIPT is a program, not a Python script")] = False,
    allow_unsharded: Annotated[
        bool, flag("--allow-unsharded", "Accept a script that never shards a model")
    ] = False,
    slurm: Annotated[
        bool, flag("--slurm", "Submit to SLURM, as set under slurm: in the file; start nothing here")
    ] = False,
    kubernetes: Annotated[
        bool, flag("--kubernetes", "Apply Kubernetes objects, as set under kubernetes: in the file")
    ] = False,
    follow: Annotated[
        bool, flag("--follow", "With --slurm or --kubernetes: show the output until the run ends")
    ] = False,
    live: Annotated[bool, flag("--live", "Show what each rank does, below the output")] = False,
    noted: NotedOption = None,
    help_all: Annotated[
        bool,
        Option("--help-all", callback=_print_all_options, is_eager=True, help="List every key's option and exit"),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Run a training script, sharded as the YAML says."""


@does("merge:merge_weights", app, "merge-weights")
def merge_weights(
    checkpoint: Annotated[
        Path, Argument(metavar="CHECKPOINT", help="Checkpoint folder, or a folder that holds one")
    ],
    output: Annotated[Path, Argument(metavar="OUTPUT", help="Folder for the result; its other files stay")],
    unsafe_serialization: Annotated[
        bool, both_ways("--unsafe-serialization", "Write pytorch_model.bin instead of safetensors")
    ] = False,
    file_format: Annotated[
        str, takes("FORMAT", "safetensors, or torch for pytorch_model.bin", "--format")
    ] = "safetensors",
    remove_checkpoint_dir: Annotated[
        bool,
        both_ways("--remove-checkpoint-dir", "Delete the checkpoint after verifying the result"),
    ] = False,
    overwrite: Annotated[bool, flag("--overwrite", "Replace weights that are in OUTPUT")] = False,
    verify: Annotated[bool, flag("--verify", "Read the result back and compare")] = False,
    no_checksums: Annotated[
        bool, flag("--no-checksums", "Do not compare with the checkpoint's checksums while copying")
    ] = False,
    max_shard_size: Annotated[str, size("--max-shard-size", "Largest output file, such as 5GB")] = "50GB",
    dtype: Annotated[str | None, takes("TYPE", "Convert floating-point weights: bf16, fp16 or fp32")] = None,
    only: Annotated[
        list[str] | None, takes("PATTERN", "Merge only these weights: shell pattern or prefix")
    ] = None,
    exclude: Annotated[
        list[str] | None, takes("PATTERN", "Leave these weights out: shell pattern or prefix")
    ] = None,
    rename: Annotated[list[str] | None, takes("OLD=NEW", "Replace OLD at the start of names by NEW")] = None,
    keep_tied: Annotated[
        bool, flag("--keep-tied", "Write a weight with several names under each of them")
    ] = False,
    copy_from: Annotated[
        Path | None, takes("MODEL_DIR", "Copy config, tokenizer and the like from this folder")
    ] = None,
    dry_run: Annotated[bool, flag("--dry-run", "Show what would be written; write nothing")] = False,
    as_json: JsonOption = False,
) -> None:
    """Join a sharded checkpoint into safetensors."""


@does(
    "fsdplaunch.estimate.command:estimate",
    app,
    "estimate",
    epilog="Examples: fsdplaunch estimate 8b --world-size 64 --gpu-memory 80GB --batch-size 2 --seq-len 4096; "
    "fsdplaunch estimate train.py:build_model.",
)
def estimate(
    source: Annotated[
        str | None,
        Argument(
            metavar="MODEL",
            help="MODEL_DIR, org/model, a size (8b), CONFIG.json or SCRIPT.py:FUNCTION",
            show_default=False,
        ),
    ] = None,
    file: ConfigOption = None,
    overrides: SetOption = None,
    world_size: Annotated[int | None, whole("--world-size", 1, 2**24, "Ranks over all nodes")] = None,
    gpu_memory: Annotated[int | None, size("--gpu-memory", "Memory of one GPU, such as 80GB")] = None,
    batch_size: Annotated[int, whole("--batch-size", 1, 2**24, "Sequences per rank and step")] = 1,
    seq_len: Annotated[int | None, whole("--seq-len", 1, 2**30, "Tokens of each sequence")] = None,
    optimizer: Annotated[str, takes("NAME", "adamw, adam, nadam, adagrad, rmsprop, momentum or sgd")] = "adamw",
    as_json: JsonOption = False,
) -> None:
    """Say whether a run fits into memory.

    It prints how much each GPU needs, for what, and what to change if that is too much.
    """


@does("doctor:doctor", app, "doctor")
def doctor(
    file: ConfigOption = None,
    overrides: SetOption = None,
    network: Annotated[
        bool, flag("--network", "Start a short test of the connections between all workers")
    ] = False,
    no_torch: Annotated[bool, flag("--no-torch", "Do not import torch (saves seconds)")] = False,
    paste: Annotated[bool, flag("--paste", "Print a block for a bug report, without secrets or names")] = False,
    as_json: JsonOption = False,
) -> None:
    """Say what this machine has and what prevents training; exit 3 if something does."""


@does("check:check", app, "check", epilog=CHECK_EPILOG, context_settings=SCRIPT_SETTINGS)
def check(
    context: typer.Context,
    script: ScriptToTry = None,
    file: ConfigOption = None,
    overrides: SetOption = None,
    module: ModuleOption = False,
    steps: Annotated[int | None, whole("--steps", 1, 10**6, CHECK_STEPS, show_default=False)] = None,
    compare: Annotated[
        bool, flag("--compare", "Run it in one process too, and compare losses, gradients, parameters")
    ] = False,
    tolerance: Annotated[
        float, number("--tolerance", 1e-15, 1, "Relative difference that counts as equal")
    ] = 1e-4,
    noted: NotedOption = None,
    as_json: JsonOption = False,
) -> None:
    """Try a script with its configuration on two CPU workers.

    It runs a few steps, and writes and reads a checkpoint.

    With --compare, say whether it computes the same as in one process, or where and why not; exit 1 if not.
    """


@does(
    "warm:warm",
    app,
    "warm",
    epilog="fsdplaunch launch --keep-warm 600 train.py keeps an interpreter for the next launch.",
)
def warm(
    stop: Annotated[bool, flag("--stop", "End them; their runs go on")] = False,
    as_json: JsonOption = False,
) -> None:
    """List or stop the interpreters that are kept for the next launch."""


@does(
    "fsdplaunch.tune.command:tune",
    app,
    "tune",
    epilog="Examples: fsdplaunch tune train.py --lr 3e-4; fsdplaunch tune --write fast.yaml "
    "train.py; fsdplaunch tune --try fsdp_reshard_after_forward=true,false train.py. "
    "Everything after SCRIPT belongs to the script.",
    context_settings=SCRIPT_SETTINGS,
)
def tune(
    context: typer.Context,
    script: Annotated[str | None, script_argument("Script to measure, and its arguments")] = None,
    file: ConfigOption = None,
    overrides: SetOption = None,
    module: ModuleOption = False,
    tries: Annotated[
        list[str] | None,
        takes("KEY=V1,V2", "Try these values, and only keys named by --try", "--try"),
    ] = None,
    steps: Annotated[int, whole("--steps", 3, 10**6, "Optimizer steps measured per launch")] = 10,
    limit_seconds: Annotated[float, number("--time-limit", 1, 10**7, "Seconds that one launch may take")] = 300,
    memory: Annotated[int | None, size("--memory", "Memory that a worker may use [default: the GPU's]")] = None,
    precision: Annotated[bool, flag("--allow-precision", "Try other dtypes too")] = False,
    compile: Annotated[  # noqa: A002  (as the option has it)
        bool, flag("--compile", "Try torch.compile too")
    ] = False,
    allow_writes: Annotated[bool, flag("--allow-writes", "Let the script write outside its own folder")] = False,
    write: Annotated[Path | None, takes("FILE", "Write the best configuration to FILE")] = None,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure which configuration is fastest here and fits.

    It launches the script with one configuration after another, for a few steps each.
    """


@does("fsdplaunch.watch.command:watch", app, "watch")
def watch(
    run: RunArgument = "latest",
    once: Annotated[bool, flag("--once", "Print the state once, and exit")] = False,
    file: ConfigOption = None,
    log_dir: LogDirOption = None,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object per line, once a second")] = False,
) -> None:
    """Show what each rank of a run does, how fast, and which one is slow.

    The run may still run, or have ended. q or Ctrl-C ends the view and not the run.
    """


@does("doctor:doctor", app, "env", hidden=True, fixed={"paste": True})
def env(file: ConfigOption = None) -> None:
    """Print the block for a bug report, as doctor --paste does; for users of accelerate."""


@does("check:test", app, "test", hidden=True, epilog=CHECK_EPILOG, context_settings=SCRIPT_SETTINGS)
def test(
    context: typer.Context,
    script: ScriptToTry = None,
    file: ConfigOption = None,
    overrides: SetOption = None,
    module: ModuleOption = False,
    as_json: JsonOption = False,
) -> None:
    """Try a script, as check does; for users of accelerate. Without a script, test the workers' connections."""


@does("runs:list_runs", runs_app)
def runs(
    context: typer.Context,
    file: ConfigOption = None,
    log_dir: LogDirOption = None,
    limit: Annotated[int, whole("--limit", 1, 10**6, "How many, newest first", short="-n")] = 20,
    as_json: JsonOption = False,
) -> None:
    """List runs, newest first, with their states."""


@does("fsdplaunch.watch.describe:show", runs_app, "show")
def runs_show(
    run: RunArgument = "latest",
    html: Annotated[Path | None, takes("FILE", "Write a page with charts of all ranks' steps instead")] = None,
    file: ConfigOption = None,
    log_dir: LogDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a run: command, configuration, versions, speed, waiting, memory, checkpoints, end."""


@does("fsdplaunch.watch.describe:compare", runs_app, "compare")
def runs_compare(
    first: RunArgument,
    second: RunArgument,
    file: ConfigOption = None,
    log_dir: LogDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show how two runs differ in configuration and speed."""


@does("runs:show_logs", runs_app, "logs")
def runs_logs(
    run: RunArgument = "latest",
    rank: Annotated[
        int | None, whole("--rank", 0, 2**24, "One rank's output instead of what the launcher showed")
    ] = None,
    stderr: Annotated[bool, flag("--stderr", "That rank's error output")] = False,
    follow: Annotated[bool, flag("--follow", "Keep printing until the run ends")] = False,
    file: ConfigOption = None,
    log_dir: LogDirOption = None,
) -> None:
    """Print a run's output."""


@does("runs:prune_runs", runs_app, "prune")
def runs_prune(
    older_than: Annotated[int, age("--older-than", "Only runs unchanged for this long, such as 30d")],
    yes: Annotated[bool, Option("--yes", "-y", help="Delete without asking")] = False,
    file: ConfigOption = None,
    log_dir: LogDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """List old runs, ask, and delete their folders.

    Runs that may still be running stay, and so do folders with files that no launch writes, such as a checkpoint.
    """


@does("runs:cancel_run", runs_app, "cancel")
def runs_cancel(run: RunArgument, file: ConfigOption = None, log_dir: LogDirOption = None) -> None:
    """Ask a run to end; its workers may save first."""


@does(
    "config:write_config",
    config_app,
    epilog="Examples: fsdplaunch config; fsdplaunch config --yes; fsdplaunch config --preset laptop_cpu --yes; "
    "fsdplaunch config --from accelerate.yaml; fsdplaunch config --set mixed_precision=bf16 --yes.",
)
def config(
    context: typer.Context,
    yes: Annotated[bool, Option("--yes", "-y", help="Take every suggestion without asking")] = False,
    no_input: Annotated[bool, flag("--no-input", "Never ask; fail where an answer is needed")] = False,
    output: Annotated[Path | None, takes("FILE", "File to write [default: fsdp.yaml]", "-o", "--output")] = None,
    overrides: SetOption = None,
    preset: Annotated[
        str | None,
        takes("NAME", "Start from a preset; `config presets` lists them", autocompletion=completed(presets)),
    ] = None,
    source: Annotated[
        Path | None, takes("FILE", "Start from another file, for example accelerate's", "--from")
    ] = None,
    overwrite: OverwriteOption = False,
    where: Annotated[str | None, takes("PLACE", "here, machines, slurm, cpu or tpu")] = None,
    nodes: Annotated[str | None, takes("N", "Nodes that take part")] = None,
    rendezvous: Annotated[str | None, takes("HOST:PORT", "Address of node 0")] = None,
    workers_per_node: Annotated[str | None, takes("N", "Workers on each node, or auto")] = None,
    model: Annotated[str | None, takes("MODEL", "Model folder, or a size such as 8b; not stored")] = None,
    goal: Annotated[str | None, takes("GOAL", "balanced, fastest, hybrid or biggest")] = None,
    precision: Annotated[str | None, takes("DTYPE", "bf16, fp16 or no")] = None,
    wrap: Annotated[str | None, takes("UNITS", "auto, CLASS,..., size:N or none")] = None,
    as_json: JsonOption = False,
) -> None:
    """Write fsdp.yaml: look at this machine, ask a few questions, show what will be written."""


@does("config:show", config_app, "show")
def config_show(
    file: ConfigOption = None,
    overrides: SetOption = None,
    origin: Annotated[bool, flag("--origin", "Say where each value comes from")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the effective values."""


@does("config:set_values", config_app, "set")
def config_set(
    assignments: Annotated[
        list[str], Argument(metavar="KEY=VALUE...", help="What to change", autocompletion=ASSIGNMENTS)
    ],
    file: ConfigOption = None,
) -> None:
    """Change keys in the file, and keep its comments and layout."""


@does("config:validate", config_app, "validate")
def config_validate(
    files: Annotated[
        list[Path] | None, Argument(metavar="FILE...", help="Files to check [default: ./fsdp.yaml]")
    ] = None,
    strict: Annotated[bool, flag("--strict", "Count notes, such as keys without effect, as problems")] = False,
    as_json: JsonOption = False,
) -> None:
    """Report every problem of one or more files."""


@does("config:explain", config_app, "explain")
def config_explain(
    word: Annotated[
        str | None,
        Argument(
            metavar="KEY",
            help="A key or a section [default: list all]",
            autocompletion=completed(keys_and_sections),
        ),
    ] = None,
    file: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a key does, its values, its default and yours."""


@does("config:schema", config_app, "schema")
def config_schema() -> None:
    """Print the JSON Schema of the file, for editors."""


@does("config:presets", config_app, "presets")
def config_presets(
    name: Annotated[
        str | None, Argument(metavar="NAME", help="Print this one", autocompletion=completed(presets))
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List ready-made configurations, or print one."""


@does("config:convert", config_app, "convert")
def config_convert(
    source: Annotated[Path, Argument(metavar="SOURCE", help="File to read")],
    target: Annotated[Path, Argument(metavar="TARGET", help="File to write")],
    to: Annotated[str, takes("FORMAT", "fsdp2")],
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Convert a file, and name every key that changes or is dropped."""


_WITH_KEYS: dict[str, Callable[..., None]] = {"launch": launch, "check": check}
"""Commands before whose script every configuration key is an option."""


def expanded(argv: list[str]) -> list[str]:
    """Turn configuration keys written as options of `launch` or `check` into `--set`; anything else stays."""
    if not argv or argv[0] not in _WITH_KEYS or not "".join(argv[1:2]).startswith("-"):
        return argv
    from fsdplaunch.cli.key_options import expand

    flags, options = own_options(argv[0])
    return [argv[0], *expand(argv[1:], own_flags=flags, own_options=options)]


def own_options(command: str) -> tuple[set[str], set[str]]:
    """Return names of a command's own options: those without a value, and those with one."""
    flags, options = {"--help", "-h"}, set[str]()
    for name, parameter in signature(_WITH_KEYS[command]).parameters.items():
        for info in getattr(parameter.annotation, "__metadata__", ()):
            if isinstance(info, typer.models.OptionInfo):
                spelled = "--" + name.replace("_", "-")
                first = () if info.default is ... else (str(info.default),)  # typer keeps the first spelling there
                written = {*first, *(info.param_decls or ())}
                names = written or {spelled, spelled.replace("--", "--no-", 1)}
                (flags if parameter.annotation.__origin__ is bool else options).update(names)
    return flags, options
