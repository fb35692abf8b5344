"""The commands about runs, checkpoints and this machine: their options, and what is called with them.

Everything a command needs is imported when it is called: `fsdplaunch --help` takes tens of milliseconds.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
import typer.models

from fsdplaunch.cli.options import (
    ConfigOption,
    JsonOption,
    OverwriteOption,
    SetOption,
    group,
    number,
    script_argument,
    whole,
)
from fsdplaunch.cli.output import Output

LAUNCH_EPILOG = (
    "Examples: fsdplaunch launch train.py --lr 3e-4; fsdplaunch launch --dry-run train.py; "
    "fsdplaunch launch --set fsdp_sharding_strategy=SHARD_GRAD_OP train.py. "
    "Everything after SCRIPT belongs to the script."
)


def _print_all_options(wanted: bool) -> None:
    if wanted:
        from fsdplaunch.cli.key_options import list_options

        Output().data(list_options())
        raise typer.Exit


def launch(
    context: typer.Context,
    script: Annotated[str | None, script_argument("Script to run on every rank, and its arguments")] = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in python -m")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the environment and the command; start nothing")
    ] = False,
    check_only: Annotated[
        bool, typer.Option("--check-only", help="Check that this machine can run it; start nothing")
    ] = False,
    no_python: Annotated[
        bool,
        typer.Option("--no-python", "--no_python", help="SCRIPT is a program of its own, not run in Python"),
    ] = False,
    allow_unsharded: Annotated[
        bool, typer.Option("--allow-unsharded", help="Accept a script that never shards a model")
    ] = False,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="Submit to SLURM as slurm: in the file says; start nothing here")
    ] = False,
    kubernetes: Annotated[
        bool, typer.Option("--kubernetes", help="Apply Kubernetes objects as kubernetes: in the file says")
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="With --slurm or --kubernetes: show the output until the end")
    ] = False,
    noted: Annotated[list[str] | None, typer.Option("--noted", hidden=True)] = None,
    help_all: Annotated[
        bool,
        typer.Option(
            "--help-all", callback=_print_all_options, is_eager=True, help="List every key's option and exit"
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Run a training script, sharded as the YAML says."""
    from fsdplaunch.cli.launch.dispatch import launch_script, one_route
    from fsdplaunch.cli.launch.single_node import LaunchOptions

    launch_options = LaunchOptions(
        module=module,
        no_python=no_python,
        dry_run=dry_run,
        check_only=check_only,
        allow_unsharded=allow_unsharded,
        as_json=as_json,
        route=one_route(slurm=slurm, kubernetes=kubernetes, follow=follow),
        follow=follow,
        noted=tuple(noted or ()),
    )
    status = launch_script(
        script, context.args, file=config, overrides=overrides or [], launch_options=launch_options, out=Output()
    )
    raise typer.Exit(status)


runs_app = group("List runs, show their output, cancel one.")

LogDirOption = Annotated[
    Path | None,
    typer.Option("--log-dir", metavar="FOLDER", help="Folder with the runs [default: launch.log_dir of the file]"),
]


@runs_app.callback(invoke_without_command=True)
def runs(
    context: typer.Context,
    config: ConfigOption = None,
    log_dir: LogDirOption = None,
    limit: Annotated[
        int,
        typer.Option(
            "-n", "--limit", parser=whole("--limit", 1, 10**6), metavar="N", help="How many, newest first"
        ),
    ] = 20,
    as_json: JsonOption = False,
) -> None:
    """List runs, newest first, with their states."""
    if context.invoked_subcommand is None:
        from fsdplaunch.cli import runs as run_commands

        raise typer.Exit(run_commands.list_runs(config, log_dir, limit=limit, as_json=as_json, out=Output()))


@runs_app.command("logs")
def runs_logs(
    run: Annotated[str, typer.Argument(metavar="ID", help="The run, or as much of its name as is unique; latest")],
    rank: Annotated[
        int | None,
        typer.Option(
            parser=whole("--rank", 0, 2**24),
            metavar="N",
            help="One rank's output instead of what the launcher showed",
        ),
    ] = None,
    stderr: Annotated[bool, typer.Option("--stderr", help="That rank's error output")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the run ends")] = False,
    config: ConfigOption = None,
    log_dir: LogDirOption = None,
) -> None:
    """Print a run's output."""
    from fsdplaunch.cli import runs as run_commands

    wanted = run_commands.LogRequest(rank=rank, stream="stderr" if stderr else "stdout", follow=follow)
    raise typer.Exit(run_commands.show_logs(run, config, log_dir, wanted=wanted, out=Output()))


@runs_app.command("cancel")
def runs_cancel(
    run: Annotated[str, typer.Argument(metavar="ID", help="The run, or as much of its name as is unique; latest")],
    config: ConfigOption = None,
    log_dir: LogDirOption = None,
) -> None:
    """Ask a run to end; its workers may save first."""
    from fsdplaunch.cli import runs as run_commands

    raise typer.Exit(run_commands.cancel_run(run, config, log_dir, out=Output()))


ESTIMATE_EPILOG = (
    "Examples: fsdplaunch estimate Llama-3.1-8B --world-size 64 --gpu-memory 80GB --batch-size 2 --seq-len 4096; "
    "fsdplaunch estimate train.py:build_model --exact."
)
CHECK_EPILOG = (
    "Example: fsdplaunch check train.py --lr 3e-4. Keys are options before SCRIPT, as for launch (--hide-ranks); "
    "everything after it belongs to the script."
)


def estimate(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="MODEL_DIR, org/model, a size (8b), CONFIG.json or SCRIPT.py:FUNCTION",
            show_default=False,
        ),
    ] = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    world_size: Annotated[
        int | None, typer.Option(parser=whole("--world-size", 1, 2**24), metavar="N", help="Ranks over all nodes")
    ] = None,
    gpu_memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory of one GPU, as in 80GB")] = None,
    batch_size: Annotated[
        int, typer.Option(parser=whole("--batch-size", 1, 2**24), metavar="N", help="Sequences per rank and step")
    ] = 1,
    seq_len: Annotated[
        int | None, typer.Option(parser=whole("--seq-len", 1, 2**30), metavar="N", help="Tokens of each sequence")
    ] = None,
    optimizer: Annotated[
        str, typer.Option(metavar="NAME", help="adamw, adam, nadam, adagrad, rmsprop, momentum or sgd")
    ] = "adamw",
    exact: Annotated[
        bool, typer.Option("--exact", help="Shard the model and trace one step (needs torch)")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Say whether a run fits into memory.

    It says how much each GPU needs, and for what, and what to change where that is too much.
    """
    from fsdplaunch.cli.estimate import EstimateRequest
    from fsdplaunch.cli.estimate import estimate as run_estimate
    from fsdplaunch.cli.options import parse_size

    wanted = EstimateRequest(
        source=source,
        world=world_size,
        gpu_memory=parse_size(gpu_memory, option="--gpu-memory") if gpu_memory else None,
        batch_size=batch_size,
        length=seq_len,
        optimizer=optimizer,
        exact=exact,
    )
    raise typer.Exit(run_estimate(wanted, file=config, overrides=overrides or [], as_json=as_json, out=Output()))


def doctor(
    config: ConfigOption = None,
    overrides: SetOption = None,
    network: Annotated[
        bool, typer.Option("--network", help="Start a short test of the connections between all workers")
    ] = False,
    no_torch: Annotated[bool, typer.Option("--no-torch", help="Do not import torch (saves seconds)")] = False,
    paste: Annotated[
        bool, typer.Option("--paste", help="Print the block for a bug report, without secrets and names")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Say what this machine has and what prevents training.

    Exit 3 if something does.
    """
    from fsdplaunch.cli.doctor import doctor as run_doctor

    status = run_doctor(
        file=config,
        overrides=overrides or [],
        network=network,
        no_torch=no_torch,
        paste=paste,
        as_json=as_json,
        out=Output(),
    )
    raise typer.Exit(status)


def env(config: ConfigOption = None) -> None:
    """Print the block for a bug report: what accelerate calls env, here doctor --paste."""
    doctor(config=config, paste=True)


def check(
    context: typer.Context,
    script: Annotated[str | None, script_argument("Script to try, and its arguments")] = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in python -m")] = False,
    steps: Annotated[
        int | None,
        typer.Option(
            parser=whole("--steps", 1, 10**6),
            metavar="N",
            help="Optimizer steps after which the script is ended; 2, or 5 with --compare",
            show_default=False,
        ),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Run it in one process too, and compare losses, gradients, parameters"),
    ] = False,
    tolerance: Annotated[
        float,
        typer.Option(
            parser=number("--tolerance", 0, 1), metavar="X", help="Relative difference that counts as equal"
        ),
    ] = 1e-4,
    noted: Annotated[list[str] | None, typer.Option("--noted", hidden=True)] = None,
    as_json: JsonOption = False,
) -> None:
    """Try a script with its configuration on two CPU workers.

    It runs a few steps, and writes and reads a checkpoint.

    With --compare, say whether it computes what it does in one process, or where and why not; exit 1 if not.
    """
    from fsdplaunch.cli.check import check as run_check

    arguments = list(context.args)
    if not compare and arguments[:1] == ["--compare"]:  # right after the script it is this command's as well
        compare, arguments = True, arguments[1:]
    status = run_check(
        script,
        arguments,
        file=config,
        overrides=overrides or [],
        module=module,
        steps=steps,
        as_json=as_json,
        out=Output(),
        compare=compare,
        tolerance=tolerance,
        noted=noted or (),
    )
    raise typer.Exit(status)


def test(
    context: typer.Context,
    script: Annotated[str | None, script_argument("Script to try, and its arguments")] = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in python -m")] = False,
    as_json: JsonOption = False,
) -> None:
    """Try a script as check does: what accelerate calls test. Without a script, try the workers' connections."""
    if script is None:
        doctor(config=config, overrides=overrides, network=True, as_json=as_json)
    check(context, script, config=config, overrides=overrides, module=module, as_json=as_json)


_COUNT = whole("--jobs", -(10**6), 10**6)
"""How many it may be is for MergeOptions to say."""

CheckpointArgument = Annotated[
    Path, typer.Argument(metavar="CHECKPOINT", help="Checkpoint folder, or a folder that holds one")
]
OutputArgument = Annotated[
    Path, typer.Argument(metavar="OUTPUT", help="Folder for the result; its other files stay")
]
UnsafeSerializationOption = Annotated[
    bool,
    typer.Option(
        "--unsafe-serialization",
        "--unsafe_serialization",
        help="Write pytorch_model.bin instead of safetensors",
    ),
]
FileFormatOption = Annotated[
    str, typer.Option("--format", metavar="FORMAT", help="safetensors, or torch for pytorch_model.bin")
]
RemoveCheckpointDirOption = Annotated[
    bool,
    typer.Option(
        "--remove-checkpoint-dir",
        "--remove_checkpoint_dir",
        help="Delete the checkpoint once the result has been read back and found equal",
    ),
]
OverwriteWeightsOption = Annotated[bool, typer.Option("--overwrite", help="Replace weights that OUTPUT holds")]
VerifyOption = Annotated[bool, typer.Option("--verify", help="Read the result back and compare")]
NoChecksumsOption = Annotated[
    bool, typer.Option("--no-checksums", help="Do not compare with the checkpoint's checksums while copying")
]
MaxShardSizeOption = Annotated[str, typer.Option(metavar="SIZE", help="Largest output file, as in 5GB")]
DtypeOption = Annotated[
    str | None, typer.Option(metavar="TYPE", help="Convert floating-point weights: bf16, fp16 or fp32")
]
OnlyOption = Annotated[
    list[str] | None, typer.Option(metavar="PATTERN", help="Merge only these weights: shell pattern or prefix")
]
ExcludeOption = Annotated[
    list[str] | None, typer.Option(metavar="PATTERN", help="Leave these weights out: shell pattern or prefix")
]
RenameOption = Annotated[
    list[str] | None, typer.Option(metavar="OLD=NEW", help="Replace the leading parts OLD of names by NEW")
]
KeepTiedOption = Annotated[
    bool, typer.Option("--keep-tied", help="Write a weight with several names under each of them")
]
OptimizerOption = Annotated[
    bool, typer.Option("--optimizer", help="Merge the optimizer's state into optimizer.bin instead")
]
CopyFromOption = Annotated[
    Path | None, typer.Option(metavar="MODEL_DIR", help="Copy config, tokenizer and the like from this folder")
]
PartsOption = Annotated[
    str | None,
    typer.Option(metavar="N/M", help="Write part N of M only; the last one to finish makes OUTPUT of all"),
]
JobsOption = Annotated[
    int,
    typer.Option(parser=_COUNT, metavar="N", help="How many processes write on this machine"),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Show what would be written; write nothing")]


def merge_weights(
    checkpoint: CheckpointArgument,
    output: OutputArgument,
    unsafe_serialization: UnsafeSerializationOption = False,
    file_format: FileFormatOption = "safetensors",
    remove_checkpoint_dir: RemoveCheckpointDirOption = False,
    overwrite: OverwriteWeightsOption = False,
    verify: VerifyOption = False,
    no_checksums: NoChecksumsOption = False,
    max_shard_size: MaxShardSizeOption = "50GB",
    dtype: DtypeOption = None,
    only: OnlyOption = None,
    exclude: ExcludeOption = None,
    rename: RenameOption = None,
    keep_tied: KeepTiedOption = False,
    optimizer: OptimizerOption = False,
    copy_from: CopyFromOption = None,
    parts: PartsOption = None,
    jobs: JobsOption = 1,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Join a sharded checkpoint into safetensors."""
    from fsdplaunch.checkpoint.merge.merge import MergeOptions
    from fsdplaunch.cli.merge import merge_command, parse_format, parse_part, parse_rename
    from fsdplaunch.cli.options import parse_size

    options = MergeOptions(
        max_shard_size=parse_size(max_shard_size),
        overwrite=overwrite,
        verify=verify or remove_checkpoint_dir,
        checksums=not no_checksums,
        safe_serialization=parse_format(file_format) and not unsafe_serialization,
        remove_checkpoint_dir=remove_checkpoint_dir,
        dtype=dtype,
        only=tuple(only or ()),
        exclude=tuple(exclude or ()),
        rename=tuple(map(parse_rename, rename or ())),
        keep_tied=keep_tied,
        copy_from=copy_from,
        optimizer=optimizer,
        part=None if parts is None else parse_part(parts),
        jobs=jobs,
    )
    merge_command(checkpoint, output, options=options, dry_run=dry_run, as_json=as_json, out=Output())


TUNE_EPILOG = (
    "Examples: fsdplaunch tune train.py --lr 3e-4; fsdplaunch tune --write fast.yaml train.py; "
    "fsdplaunch tune --try fsdp_reshard_after_forward=true,false train.py. "
    "Everything after SCRIPT belongs to the script."
)


def tune(
    context: typer.Context,
    script: Annotated[str | None, script_argument("Script to measure, and its arguments")] = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in python -m")] = False,
    tries: Annotated[
        list[str] | None,
        typer.Option("--try", metavar="KEY=V1,V2", help="Try these values, and only keys that are named so"),
    ] = None,
    steps: Annotated[
        int,
        typer.Option(
            parser=whole("--steps", 3, 10**6), metavar="N", help="Optimizer steps measured in a first launch"
        ),
    ] = 10,
    time_limit: Annotated[
        float,
        typer.Option(
            parser=number("--time-limit", 1, 10**7), metavar="X", help="Seconds that one launch may take"
        ),
    ] = 300,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="What a worker may need [default: the GPU's memory]")
    ] = None,
    precision: Annotated[bool, typer.Option("--allow-precision", help="Try other dtypes too")] = False,
    compiled: Annotated[bool, typer.Option("--compile", help="Try torch.compile too")] = False,
    allow_writes: Annotated[
        bool, typer.Option("--allow-writes", help="Let the script write outside of its own folder")
    ] = False,
    write: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the best as a configuration")] = None,
    overwrite: OverwriteOption = False,
    resume: Annotated[
        str | None, typer.Option(metavar="FOLDER|ID", help="Go on with a search that was stopped")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure which configuration is fastest here and fits.

    It launches the script itself with one after the other, for a few steps each.
    """
    from fsdplaunch.cli.options import parse_size
    from fsdplaunch.cli.tune import TuneOutputs, TuneRequest
    from fsdplaunch.cli.tune import tune as run_tune

    request = TuneRequest(
        script=script,
        arguments=tuple(context.args),
        module=module,
        file=str(config) if config is not None else None,
        overrides=tuple(overrides or ()),
        tries=tuple(tries or ()),
        steps=steps,
        limit_seconds=time_limit,
        memory=parse_size(memory, option="--memory") if memory else None,
        precision=precision,
        compile=compiled,
        allow_writes=allow_writes,
    )
    outputs = TuneOutputs(write=write, overwrite=overwrite, as_json=as_json)
    raise typer.Exit(run_tune(request, resume=resume, outputs=outputs, out=Output()))


WARM_EPILOG = "fsdplaunch launch --keep-warm 600 train.py leaves one behind by itself, for the next launch."


def warm(
    show: Annotated[bool, typer.Option("--list", help="List them (the default)")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="End them; runs go on")] = False,
    start: Annotated[bool, typer.Option("--start", help="Start one for launches with this configuration")] = False,
    config: ConfigOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep torch imported for the next launch.

    Lists, stops or starts interpreters that have it and wait.
    """
    from fsdplaunch.cli import warm as commands
    from fsdplaunch.errors import UsageError

    if show + stop + start > 1:
        msg = "--list, --stop and --start are three commands"
        raise UsageError(msg, hint="give one of them")
    if start:
        raise typer.Exit(commands.start(config, overrides or [], Output()))
    if stop:
        raise typer.Exit(commands.stop_servers(Output()))
    raise typer.Exit(commands.list_servers(as_json=as_json, out=Output()))


_COMMANDS: dict[str, Callable[..., None]] = {"launch": launch, "check": check}


def expanded(argv: list[str]) -> list[str]:
    """Turn configuration keys written as options of `launch` or `check` into `--set`; anything else stays."""
    if argv[:1] not in ([name] for name in _COMMANDS) or len(argv) < 2 or not argv[1].startswith("-"):  # noqa: PLR2004
        return argv
    from fsdplaunch.cli.key_options import expand

    flags, options = own_options(argv[0])
    return [argv[0], *expand(argv[1:], own_flags=flags, own_options=options)]


def own_options(command: str) -> tuple[set[str], set[str]]:
    """Return names of a command's own options: those without a value, and those with one."""
    flags, options = {"--help", "-h"}, set[str]()
    hints: dict[str, Any] = get_type_hints(_COMMANDS[command], include_extras=True)
    for name, hint in hints.items():
        for info in getattr(hint, "__metadata__", ()):
            if isinstance(info, typer.models.OptionInfo):
                spelled = "--" + name.replace("_", "-")
                first = () if info.default is ... else (str(info.default),)  # typer keeps the first spelling there
                written = {*first, *(info.param_decls or ())}
                names = written or {spelled, spelled.replace("--", "--no-", 1)}
                (flags if hint.__origin__ is bool else options).update(names)
    return flags, options
