"""`fsdplaunch tune`."""

from pathlib import Path
from typing import Annotated

import typer

from fsdplaunch.cli.output import Output
from fsdplaunch.cli.signatures.numbers import number, whole
from fsdplaunch.cli.signatures.options import ConfigOption, JsonOption, OverwriteOption, SetOption, script_argument

EPILOG = (
    "Examples: fsdplaunch tune train.py --lr 3e-4; fsdplaunch tune --write fast.yaml --html tune.html train.py; "
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
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with the picture")] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="FOLDER|ID", help="Go on with a search that was stopped")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure which configuration is fastest here and fits.

    It launches the script itself with one after the other, for a few steps each.
    """
    from fsdplaunch.cli.size_option import parse_size
    from fsdplaunch.cli.tune.command import tune as run_tune
    from fsdplaunch.cli.tune.report import TuneOutputs
    from fsdplaunch.cli.tune.request import TuneRequest

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
    outputs = TuneOutputs(write=write, html=html, overwrite=overwrite, as_json=as_json)
    raise typer.Exit(run_tune(request, resume=resume, outputs=outputs, out=Output()))
