"""What is asked before a run: `estimate`, `doctor` and `check`."""

from pathlib import Path
from typing import Annotated

import typer

from fsdplaunch.cli.output import Output
from fsdplaunch.cli.signatures.numbers import number, whole
from fsdplaunch.cli.signatures.options import ConfigOption, JsonOption, SetOption, script_argument

ESTIMATE_EPILOG = (
    "Examples: fsdplaunch estimate Llama-3.1-8B --world-size 64 --gpu-memory 80GB --batch-size 2 --seq-len 4096; "
    "fsdplaunch estimate train.py:build_model --exact --html memory.html."
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
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with the picture")] = None,
    as_json: JsonOption = False,
) -> None:
    """Say whether a run fits into memory.

    It says how much each GPU needs, and for what, and what to change where that is too much.
    """
    from fsdplaunch.cli.estimate import EstimateRequest
    from fsdplaunch.cli.estimate import estimate as run_estimate
    from fsdplaunch.cli.size_option import parse_size

    wanted = EstimateRequest(
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
