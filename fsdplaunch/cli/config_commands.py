"""`fsdplaunch config` and its commands."""

from pathlib import Path
from typing import Annotated

import typer

from fsdplaunch.cli.options import ConfigOption, JsonOption, OverwriteOption, SetOption, group
from fsdplaunch.cli.output import Output

config_app = group("Write, show, check and convert the configuration file.")

CONFIG_EPILOG = (
    "Examples: fsdplaunch config; fsdplaunch config --yes; fsdplaunch config --preset cpu_debug --yes; "
    "fsdplaunch config --from accelerate.yaml; fsdplaunch config --set mixed_precision=bf16 --yes."
)

YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Take every suggestion without asking")]
NoInputOption = Annotated[bool, typer.Option("--no-input", help="Never ask; fail where an answer is needed")]
OutputOption = Annotated[
    Path | None, typer.Option("-o", "--output", metavar="FILE", help="File to write [default: fsdp.yaml]")
]
PresetOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="Start from a preset; `config presets` lists them")
]
SourceOption = Annotated[
    Path | None,
    typer.Option("--from", metavar="FILE", help="Start from another file, for example accelerate's"),
]
ScriptOption = Annotated[
    str | None, typer.Option(metavar="'FILE ARGS'", help="Offer to measure this script at the end")
]

WhereAnswer = Annotated[str | None, typer.Option(metavar="PLACE", help="here, machines, slurm, cpu or tpu")]
NodesAnswer = Annotated[str | None, typer.Option(metavar="N", help="Nodes that take part")]
RendezvousAnswer = Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Address of node 0")]
WorkersPerNodeAnswer = Annotated[str | None, typer.Option(metavar="N", help="Workers on each node, or auto")]
XlaAnswer = Annotated[str | None, typer.Option(metavar="WAY", help="On TPUs: wrapper, or spmd for xla_fsdp_v2")]
XlaGradCkptAnswer = Annotated[str | None, typer.Option(metavar="yes|no", help="On TPUs: gradient checkpointing")]
XlaSettingsAnswer = Annotated[
    str | None, typer.Option(metavar="NAME=VALUE,...", help="On TPUs: xla_fsdp_settings")
]
ModelAnswer = Annotated[
    str | None, typer.Option(metavar="MODEL", help="Model folder, or a size such as 8b; not stored")
]
GoalAnswer = Annotated[str | None, typer.Option(metavar="GOAL", help="balanced, fastest, hybrid or biggest")]
PrecisionAnswer = Annotated[str | None, typer.Option(metavar="DTYPE", help="bf16, fp16 or no")]
WrapAnswer = Annotated[str | None, typer.Option(metavar="UNITS", help="auto, CLASS,..., size:N or none")]
CheckpointDirAnswer = Annotated[str | None, typer.Option(metavar="FOLDER", help="Folder for checkpoints")]


@config_app.callback(invoke_without_command=True, epilog=CONFIG_EPILOG)
def config(
    context: typer.Context,
    yes: YesOption = False,
    no_input: NoInputOption = False,
    output: OutputOption = None,
    overrides: SetOption = None,
    preset: PresetOption = None,
    source: SourceOption = None,
    overwrite: OverwriteOption = False,
    where: WhereAnswer = None,
    nodes: NodesAnswer = None,
    rendezvous: RendezvousAnswer = None,
    workers_per_node: WorkersPerNodeAnswer = None,
    xla: XlaAnswer = None,
    xla_grad_ckpt: XlaGradCkptAnswer = None,
    xla_settings: XlaSettingsAnswer = None,
    model: ModelAnswer = None,
    goal: GoalAnswer = None,
    precision: PrecisionAnswer = None,
    wrap: WrapAnswer = None,
    checkpoint_dir: CheckpointDirAnswer = None,
    script: ScriptOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write fsdp.yaml: look at this machine, ask a few questions, show what will be written."""
    if context.invoked_subcommand is not None:
        return
    from fsdplaunch.cli.config import write_config

    answers = {
        "where": where,
        "nodes": nodes,
        "rendezvous": rendezvous,
        "workers-per-node": workers_per_node,
        "xla": xla,
        "xla-grad-ckpt": xla_grad_ckpt,
        "xla-settings": xla_settings,
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
        script=script,
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
    from fsdplaunch.cli import config

    raise typer.Exit(
        config.show(file=file, overrides=overrides or [], origin=origin, as_json=as_json, out=Output())
    )


@config_app.command("set")
def config_set(
    assignments: Annotated[list[str], typer.Argument(metavar="KEY=VALUE...", help="What to change")],
    file: ConfigOption = None,
) -> None:
    """Change keys in the file; its comments and layout stay."""
    from fsdplaunch.cli import config

    raise typer.Exit(config.set_values(assignments, file=file, out=Output()))


@config_app.command("validate")
def config_validate(
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="FILE...", help="Files to check [default: ./fsdp.yaml]")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Count notes, such as keys without effect, as problems")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Report every problem of one or more files."""
    from fsdplaunch.cli import config

    raise typer.Exit(config.validate(files or [], strict=strict, as_json=as_json, out=Output()))


@config_app.command("explain")
def config_explain(
    key: Annotated[
        str | None, typer.Argument(metavar="KEY", help="A key or a section [default: list all]")
    ] = None,
    file: ConfigOption = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="The whole key reference as Markdown")] = False,
    as_json: JsonOption = False,
) -> None:
    """Say what a key does, its values, its default and yours."""
    from fsdplaunch.cli import config

    raise typer.Exit(config.explain(key, file=file, as_json=as_json, markdown=markdown, out=Output()))


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON Schema of the file, for editors."""
    from fsdplaunch.cli import config

    raise typer.Exit(config.schema(out=Output()))


@config_app.command("presets")
def config_presets(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Print this one")] = None,
    as_json: JsonOption = False,
) -> None:
    """List ready-made configurations, or print one."""
    from fsdplaunch.cli import config

    raise typer.Exit(config.presets(name, as_json=as_json, out=Output()))


@config_app.command("convert")
def config_convert(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="File to read")],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="File to write")],
    to: Annotated[
        str, typer.Option(metavar="FORMAT", help="fsdp2, or accelerate for a file that accelerate launch takes")
    ],
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Convert a file, and name every key that changes or is dropped."""
    from fsdplaunch.cli import config

    raise typer.Exit(config.convert(source, target, to=to, overwrite=overwrite, as_json=as_json, out=Output()))


def to_fsdp2(
    source: Annotated[Path, typer.Option("--config-file", "--config_file")],
    target: Annotated[Path | None, typer.Option("--output-file", "--output_file")] = None,
    overwrite: OverwriteOption = False,
) -> None:
    """Convert a file to FSDP2: what accelerate calls to-fsdp2."""
    from fsdplaunch.cli import config

    status = config.convert(source, target or source, to="fsdp2", overwrite=overwrite, as_json=False, out=Output())
    raise typer.Exit(status)
