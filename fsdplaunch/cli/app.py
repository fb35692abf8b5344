"""Every command's signature, help and examples; bodies are imported when they run, so that help stays light."""

import os
import sys
from pathlib import Path
from typing import Annotated, get_type_hints

import typer
import typer.models

from fsdplaunch import __version__
from fsdplaunch.cli.output import Output
from fsdplaunch.errors import LaunchError

app = typer.Typer(
    name="fsdplaunch",
    help="Launch, shard, checkpoint and merge PyTorch FSDP training.",
    epilog="Start: fsdplaunch config, then fsdplaunch launch train.py",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

config_app = typer.Typer(
    help="Write, show, check and convert the configuration file.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(config_app, name="config")

runs_app = typer.Typer(
    help="List runs and their states; show a run's output; cancel a run.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(runs_app, name="runs")

ConfigOption = Annotated[
    Path | None, typer.Option("-c", "--config", "--config_file", help="The YAML file [default: ./fsdp.yaml]")
]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one key")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout")]

OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace a file that exists")]

CONFIG_EPILOG = (
    "Examples: fsdplaunch config; fsdplaunch config --yes; fsdplaunch config --preset cpu_debug --yes; "
    "fsdplaunch config --from accelerate.yaml; fsdplaunch config --set mixed_precision=bf16 --yes."
)
LAUNCH_EPILOG = (
    "Examples: fsdplaunch launch train.py --lr 3e-4; fsdplaunch launch --dry-run train.py; "
    "fsdplaunch launch --set fsdp_sharding_strategy=SHARD_GRAD_OP train.py. "
    "Everything after SCRIPT belongs to the script."
)
ESTIMATE_EPILOG = (
    "Examples: fsdplaunch estimate Llama-3.1-8B --world-size 64 --gpu-memory 80GB --batch-size 2 --seq-len 4096; "
    "fsdplaunch estimate train.py:build_model --exact --html memory.html."
)


def run(argv: list[str]) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the program's name.

    Returns:
        The exit status.
    """
    try:
        app(args=_expanded(argv), prog_name="fsdplaunch")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has gone (| head): end quietly, and keep Python from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        return _refuse(error)
    return 0


def _refuse(error: Exception) -> int:
    """Say an error in one line and return its status; FSDPLAUNCH_TRACEBACK=1 lets it through."""
    if os.environ.get("FSDPLAUNCH_TRACEBACK"):
        raise error
    if isinstance(error, OSError):
        error = LaunchError(f"{error.strerror}: {error.filename}" if error.filename else str(error))
    if not isinstance(error, LaunchError):
        hint = "this is a bug in fsdplaunch; FSDPLAUNCH_TRACEBACK=1 shows where"
        error = LaunchError(f"{type(error).__name__}: {error}", hint=hint)
    Output().error(error)
    return error.exit_code


def _expanded(argv: list[str]) -> list[str]:
    """Turn configuration keys written as options of `launch` into `--set`; anything else stays."""
    if argv[:1] != ["launch"] or len(argv) < 2 or not argv[1].startswith("-"):  # noqa: PLR2004
        return argv
    from fsdplaunch.cli.key_options import expand

    flags, options = _own_options()
    return ["launch", *expand(argv[1:], own_flags=flags, own_options=options)]


def _own_options() -> tuple[set[str], set[str]]:
    """Names of launch's own options: those without a value, and those with one."""
    flags, options = {"--help", "--help-all"}, set[str]()
    for name, hint in get_type_hints(launch, include_extras=True).items():
        for info in getattr(hint, "__metadata__", ()):
            if isinstance(info, typer.models.OptionInfo):
                spelled = "--" + name.replace("_", "-")
                first = () if info.default is ... else (str(info.default),)  # typer keeps the first spelling there
                written = {*first, *(info.param_decls or ())}
                names = written or {spelled, spelled.replace("--", "--no-", 1)}
                (flags if hint.__origin__ is bool else options).update(names)
    return flags, options


def _print_version(wanted: bool) -> None:
    if wanted:
        Output().data(f"fsdplaunch {__version__}")
        raise typer.Exit


def _print_all_options(wanted: bool) -> None:
    if wanted:
        from fsdplaunch.cli.key_options import list_options

        Output().data(list_options())
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version")
    ] = False,
) -> None:
    """Options before any command."""


@config_app.callback(invoke_without_command=True, epilog=CONFIG_EPILOG)
def config(
    context: typer.Context,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Take every suggestion without asking")] = False,
    no_input: Annotated[
        bool, typer.Option("--no-input", help="Never ask; fail where an answer is needed")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="File to write [default: fsdp.yaml]")
    ] = None,
    overrides: SetOption = None,
    preset: Annotated[str | None, typer.Option(help="Start from a preset; `config presets` lists them")] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="Start from another file, for example accelerate's")
    ] = None,
    overwrite: OverwriteOption = False,
    where: Annotated[str | None, typer.Option(help="here, machines, slurm or cpu")] = None,
    nodes: Annotated[str | None, typer.Option(help="Machines that take part")] = None,
    rendezvous: Annotated[str | None, typer.Option(help="HOST:PORT of the first machine")] = None,
    workers_per_node: Annotated[str | None, typer.Option(help="Workers on each machine: a number or auto")] = None,
    model: Annotated[str | None, typer.Option(help="Model folder, or a size such as 8b; not stored")] = None,
    goal: Annotated[str | None, typer.Option(help="balanced, fastest, hybrid or biggest")] = None,
    precision: Annotated[str | None, typer.Option(help="bf16, fp16 or no")] = None,
    wrap: Annotated[str | None, typer.Option(help="auto, CLASS,..., size:N or none")] = None,
    checkpoint_dir: Annotated[str | None, typer.Option(help="Folder for checkpoints")] = None,
    as_json: JsonOption = False,
) -> None:
    """Write fsdp.yaml: look at this machine, ask a few questions, show what will be written."""
    if context.invoked_subcommand is not None:
        return
    from fsdplaunch.cli.wizard_cmd import write_config

    answers = {
        "where": where,
        "nodes": nodes,
        "rendezvous": rendezvous,
        "workers-per-node": workers_per_node,
        "model": model,
        "goal": goal,
        "precision": precision,
        "wrap": wrap,
        "checkpoint-dir": checkpoint_dir,
    }
    status = write_config(
        output=output,
        answers=answers,
        overrides=overrides or [],
        preset=preset,
        source=source,
        yes=yes,
        no_input=no_input,
        overwrite=overwrite,
        as_json=as_json,
        out=Output(),
    )
    raise typer.Exit(status)


@config_app.command("show")
def config_show(
    file: ConfigOption = None,
    overrides: SetOption = None,
    origin: Annotated[bool, typer.Option("--origin", help="Say where each value comes from")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the effective values."""
    from fsdplaunch.cli import config_cmd

    raise typer.Exit(
        config_cmd.show(file=file, overrides=overrides or [], origin=origin, as_json=as_json, out=Output())
    )


@config_app.command("set")
def config_set(
    assignments: Annotated[list[str], typer.Argument(metavar="KEY=VALUE...", help="What to change")],
    file: ConfigOption = None,
) -> None:
    """Change keys in the file; its comments and layout stay."""
    from fsdplaunch.cli import config_cmd

    raise typer.Exit(config_cmd.set_values(assignments, file=file, out=Output()))


@config_app.command("validate")
def config_validate(
    files: Annotated[list[Path] | None, typer.Argument(help="Files to check [default: ./fsdp.yaml]")] = None,
    as_json: JsonOption = False,
) -> None:
    """Report every problem of one or more files."""
    from fsdplaunch.cli import config_cmd

    raise typer.Exit(config_cmd.validate(files or [], as_json=as_json, out=Output()))


@config_app.command("explain")
def config_explain(
    key: Annotated[str | None, typer.Argument(help="A key or a section [default: list all]")] = None,
    file: ConfigOption = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="The whole key reference as Markdown")] = False,
    as_json: JsonOption = False,
) -> None:
    """Say what a key does, its values, its default and yours."""
    from fsdplaunch.cli import config_cmd

    raise typer.Exit(config_cmd.explain(key, file=file, as_json=as_json, markdown=markdown, out=Output()))


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON Schema of the file, for editors."""
    from fsdplaunch.cli import config_cmd

    raise typer.Exit(config_cmd.schema(out=Output()))


@config_app.command("presets")
def config_presets(
    name: Annotated[str | None, typer.Argument(help="Print this one")] = None, as_json: JsonOption = False
) -> None:
    """List ready-made configurations, or print one."""
    from fsdplaunch.cli import config_cmd

    raise typer.Exit(config_cmd.presets(name, as_json=as_json, out=Output()))


@config_app.command("convert")
def config_convert(
    source: Annotated[Path, typer.Argument(help="File to read")],
    target: Annotated[Path, typer.Argument(help="File to write")],
    to: Annotated[str, typer.Option(help="fsdp2, or accelerate for a file that accelerate launch takes")],
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Convert a file, and name every key that changes or is dropped."""
    from fsdplaunch.cli import config_cmd

    raise typer.Exit(config_cmd.convert(source, target, to=to, overwrite=overwrite, as_json=as_json, out=Output()))


@app.command("to-fsdp2", hidden=True)
def to_fsdp2(
    source: Annotated[Path, typer.Option("--config-file", "--config_file")],
    target: Annotated[Path | None, typer.Option("--output-file", "--output_file")] = None,
    overwrite: OverwriteOption = False,
) -> None:
    """Convert a file to FSDP2: what accelerate calls to-fsdp2."""
    from fsdplaunch.cli import config_cmd

    status = config_cmd.convert(
        source, target or source, to="fsdp2", overwrite=overwrite, as_json=False, out=Output()
    )
    raise typer.Exit(status)


@app.command(
    epilog=LAUNCH_EPILOG,
    context_settings={"allow_extra_args": True, "allow_interspersed_args": False},
)
def launch(
    context: typer.Context,
    script: Annotated[str | None, typer.Argument(help="Script to run on every rank", show_default=False)] = None,
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
    help_all: Annotated[
        bool,
        typer.Option(
            "--help-all", callback=_print_all_options, is_eager=True, help="List every key's option and exit"
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Run a training script on every worker, sharded as the YAML says."""
    from fsdplaunch.cli.launch_cmd import Wishes, launch_script, one_route

    wishes = Wishes(
        module=module,
        no_python=no_python,
        dry_run=dry_run,
        check_only=check_only,
        allow_unsharded=allow_unsharded,
        as_json=as_json,
        route=one_route(slurm=slurm, kubernetes=kubernetes, follow=follow),
        follow=follow,
    )
    status = launch_script(
        script, context.args, file=config, overrides=overrides or [], wishes=wishes, out=Output()
    )
    raise typer.Exit(status)


LogDirOption = Annotated[
    Path | None, typer.Option("--log-dir", help="Folder with the runs [default: launch.log_dir of the file]")
]


@runs_app.callback(invoke_without_command=True)
def runs(
    context: typer.Context,
    config: ConfigOption = None,
    log_dir: LogDirOption = None,
    limit: Annotated[int, typer.Option("-n", "--limit", help="How many, newest first")] = 20,
    as_json: JsonOption = False,
) -> None:
    """List runs, newest first, with their states."""
    if context.invoked_subcommand is None:
        from fsdplaunch.cli import runs_cmd

        raise typer.Exit(runs_cmd.list_runs(config, log_dir, limit=limit, as_json=as_json, out=Output()))


@runs_app.command("logs")
def runs_logs(
    run: Annotated[str, typer.Argument(metavar="ID", help="The run, or as much of its name as is unique; latest")],
    rank: Annotated[int | None, typer.Option(help="One rank's output instead of what the launcher showed")] = None,
    stderr: Annotated[bool, typer.Option("--stderr", help="That rank's error output")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the run ends")] = False,
    config: ConfigOption = None,
    log_dir: LogDirOption = None,
) -> None:
    """Print a run's output."""
    from fsdplaunch.cli import runs_cmd

    wanted = runs_cmd.Wanted(rank=rank, stream="stderr" if stderr else "stdout", follow=follow)
    raise typer.Exit(runs_cmd.show_logs(run, config, log_dir, wanted=wanted, out=Output()))


@runs_app.command("cancel")
def runs_cancel(
    run: Annotated[str, typer.Argument(metavar="ID", help="The run, or as much of its name as is unique; latest")],
    config: ConfigOption = None,
    log_dir: LogDirOption = None,
) -> None:
    """Ask a run to end; its workers may save first."""
    from fsdplaunch.cli import runs_cmd

    raise typer.Exit(runs_cmd.cancel_run(run, config, log_dir, out=Output()))


@app.command("merge-weights")
def merge_weights(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint folder, or a folder that holds one")],
    output: Annotated[Path, typer.Argument(help="New folder for the result")],
    unsafe_serialization: Annotated[
        bool,
        typer.Option(
            "--unsafe-serialization",
            "--unsafe_serialization",
            help="Write pytorch_model.bin instead of safetensors",
        ),
    ] = False,
    file_format: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="safetensors, or torch for pytorch_model.bin")
    ] = "safetensors",
    remove_checkpoint_dir: Annotated[
        bool,
        typer.Option(
            "--remove-checkpoint-dir",
            "--remove_checkpoint_dir",
            help="Delete the checkpoint once the result has been read back and found equal",
        ),
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUTPUT if it exists")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Read the result back and compare")] = False,
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Largest output file, as in 5GB")] = "50GB",
    dtype: Annotated[
        str | None, typer.Option(metavar="TYPE", help="Convert floating-point weights: bf16, fp16 or fp32")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Merge only these weights: shell pattern or prefix")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Leave these weights out: shell pattern or prefix")
    ] = None,
    rename: Annotated[
        list[str] | None, typer.Option(metavar="OLD=NEW", help="Replace the leading parts OLD of names by NEW")
    ] = None,
    keep_tied: Annotated[
        bool, typer.Option("--keep-tied", help="Write a weight with several names under each of them")
    ] = False,
    optimizer: Annotated[
        bool, typer.Option("--optimizer", help="Merge the optimizer's state into optimizer.bin instead")
    ] = False,
    copy_from: Annotated[
        Path | None, typer.Option(metavar="MODEL_DIR", help="Copy config, tokenizer and the like from this folder")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be written; write nothing")] = False,
    as_json: JsonOption = False,
) -> None:
    """Join a sharded checkpoint into safetensors."""
    from fsdplaunch.checkpoint.merge import MergeOptions
    from fsdplaunch.cli.merge_cmd import merge_command, parse_format, parse_rename
    from fsdplaunch.cli.size_option import parse_size

    options = MergeOptions(
        max_shard_size=parse_size(max_shard_size),
        overwrite=overwrite,
        verify=verify or remove_checkpoint_dir,
        safe_serialization=parse_format(file_format) and not unsafe_serialization,
        remove_checkpoint_dir=remove_checkpoint_dir,
        dtype=dtype,
        only=tuple(only or ()),
        exclude=tuple(exclude or ()),
        rename=tuple(map(parse_rename, rename or ())),
        keep_tied=keep_tied,
        copy_from=copy_from,
        optimizer=optimizer,
    )
    merge_command(checkpoint, output, options=options, dry_run=dry_run, as_json=as_json, out=Output())


@app.command(epilog=ESTIMATE_EPILOG)
def estimate(
    source: Annotated[
        str | None, typer.Argument(help="MODEL_DIR, CONFIG.json or SCRIPT.py:FUNCTION", show_default=False)
    ] = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    world_size: Annotated[int | None, typer.Option(help="Ranks over all machines")] = None,
    gpu_memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory of one GPU, as in 80GB")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences per rank and step")] = 1,
    seq_len: Annotated[int | None, typer.Option(min=1, help="Tokens of each sequence")] = None,
    optimizer: Annotated[
        str, typer.Option(help="adamw, adam, nadam, adagrad, rmsprop, momentum or sgd")
    ] = "adamw",
    exact: Annotated[
        bool, typer.Option("--exact", help="Shard the model and trace one step (needs torch)")
    ] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with the picture")] = None,
    as_json: JsonOption = False,
) -> None:
    """Say how much memory a run needs on each GPU, whether it fits, and what to change."""
    from fsdplaunch.cli.estimate_cmd import Wanted
    from fsdplaunch.cli.estimate_cmd import estimate as run_estimate
    from fsdplaunch.cli.size_option import parse_size

    wanted = Wanted(
        source=source,
        world=world_size,
        gpu_memory=parse_size(gpu_memory, option="--gpu-memory") if gpu_memory else None,
        batch_size=batch_size,
        length=seq_len,
        optimizer=optimizer,
        exact=exact,
        html=html,
    )
    raise typer.Exit(run_estimate(wanted, file=config, overrides=overrides or [], as_json=as_json, out=Output()))


@app.command()
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
    """Say what this machine has and what stands in the way of training; exit 3 if something does."""
    from fsdplaunch.cli.doctor_cmd import doctor as run_doctor

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


@app.command(
    epilog="Example: fsdplaunch check train.py --lr 3e-4. Everything after SCRIPT belongs to the script.",
    context_settings={"allow_extra_args": True, "allow_interspersed_args": False},
)
def check(
    context: typer.Context,
    script: Annotated[str | None, typer.Argument(help="Script to try", show_default=False)] = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in python -m")] = False,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps after which the script is ended")] = 2,
    as_json: JsonOption = False,
) -> None:
    """Try a script with its configuration: two CPU workers, a few steps, one checkpoint there and back."""
    from fsdplaunch.cli.check_cmd import check as run_check

    status = run_check(
        script,
        context.args,
        file=config,
        overrides=overrides or [],
        module=module,
        steps=steps,
        as_json=as_json,
        out=Output(),
    )
    raise typer.Exit(status)
