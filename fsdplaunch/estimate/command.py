"""`fsdplaunch estimate`: will it fit, and what to change if not. Torch, if needed, has a process of its own."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fsdplaunch.cli.output import Output
from fsdplaunch.config.load import load_config
from fsdplaunch.config.resolve import uses_xla
from fsdplaunch.config.schema.config import Config
from fsdplaunch.display_text import quoted
from fsdplaunch.errors import UsageError
from fsdplaunch.estimate.families import FAMILIES
from fsdplaunch.estimate.memory import LENGTH, TrainingSetup, ranks_of, training_setup
from fsdplaunch.estimate.model import MOST_PARAMETERS, Model, describe, llama_of, read_json_file, read_sizes
from fsdplaunch.estimate.report import Report, text_report
from fsdplaunch.estimate.trace_client import trace_step
from fsdplaunch.private_dir import make_process_dir
from fsdplaunch.probe.hardware import read_hardware
from fsdplaunch.probe.model_files import (
    FEWEST_PARAMETERS,
    find_model,
    hub_folder,
    is_hub_name,
    parse_count,
    short_count,
    weight_files,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """What was named.

    Attributes:
        path: A file to build from.
        function: In that file, which builds the model.
        model: What could be read without building; None where only `--exact` can.
        notes: What is to be said of it.
        named: In words, where that is not the path.
    """

    path: Path
    function: str = ""
    model: Model | None = None
    notes: tuple[str, ...] = ()
    named: str = ""


def estimate(
    *,
    source: str | None,
    file: Path | None,
    overrides: Sequence[str],
    world_size: int | None,
    gpu_memory: int | None,
    batch_size: int,
    seq_len: int | None,
    optimizer: str,
    exact: bool,
    as_json: bool,
    out: Output,
) -> int:
    """Say what a run needs, and whether it fits.

    Returns:
        0, whether it fits or not: the answer is the output.

    Raises:
        LaunchError: It cannot be estimated.
    """
    loaded, hardware, found = (
        load_config(file, overrides=overrides),
        read_hardware(os.environ),
        _read_source(source),
    )
    config, model, trace = loaded.config, found.model, None
    exact = exact or bool(found.function)
    world, per_node = ranks_of(config, gpus=0 if config.use_cpu else len(hardware.gpus), given=world_size)
    shape = model.shape if model else None
    longest = shape.max_length if shape is not None and shape.max_length else LENGTH
    setup = training_setup(
        config,
        world=world,
        per_node=per_node,
        batch_size=batch_size,
        length=seq_len or min(longest, LENGTH),
        optimizer=optimizer,
        on_gpu=not config.use_cpu,
    )
    if exact:
        out.say("tracing one step; this needs torch and takes seconds, or a minute for a large model")
        trace = trace_step(config, setup, source=str(found.path), function=found.function)
        model = Model(sizes=trace.sizes, shape=shape)
    elif model is None:
        model = _described(found.path)  # which says why it is not known
    file_name = str(loaded.path) if loaded.path else "the built-in defaults"
    ranks = f"{setup.world} rank{'s' if setup.world != 1 else ''}"
    place = f"{ranks}, {setup.per_node} per node" if setup.world > setup.per_node else ranks
    named = found.named or str(found.path.parent if found.path.name == "config.json" else found.path)
    report = Report(
        title=f"{named} with {file_name} on {place}", words=_words(model, setup), model=model, setup=setup,
        memory=gpu_memory or hardware.gpu_memory_bytes,
        memory_from="--gpu-memory" if gpu_memory else "the smallest GPU here",
        host_memory=hardware.memory_bytes if hardware.gpus else None, exact=trace,
        said_first=(*found.notes, *_notes(config, model, setup), *loaded.note_lines()),
    )  # fmt: skip
    if as_json:
        out.json(report.to_dict())
    else:
        out.data("\n".join(text_report(report)))
    return 0


def _notes(config: Config, model: Model, setup: TrainingSetup) -> Iterator[str]:
    """Yield what the configuration says that the estimate does not follow, or that the model does not allow."""
    if uses_xla(config):
        yield "this is for torch's FSDP on GPUs; PyTorch/XLA's memory on TPUs is another"
    if config.fsdp_config.fsdp_auto_wrap_policy == "SIZE_BASED_WRAP":
        yield "units of SIZE_BASED_WRAP are estimated as the model's blocks"
    heads = model.shape.head_count if model.shape is not None else 0
    if heads % setup.tensor:
        yield f"tp_size {setup.tensor} does not divide the model's {heads} heads: its attention cannot be split"
    elif config.sharding.context_parallel_attention == "heads" and heads // setup.tensor % setup.context:
        yield (
            f"cp_size {setup.context} does not divide the model's {heads} heads: training would stop"
            " at its first step; set sharding.context_parallel_attention to auto or ring"
        )


def _read_source(text: str | None) -> _Source:
    """Read what was named, as far as that needs no torch."""
    if text is None:
        newest = find_model(Path.cwd())
        if newest is None:
            msg = "no model was named, and no folder here holds *.safetensors"
            raise UsageError(msg, hint="fsdplaunch estimate MODEL_DIR, CONFIG.json or SCRIPT.py:FUNCTION")
        found = _read_folder(newest)
        return replace(found, notes=(f"no model was named: {newest} has the newest weights here", *found.notes))
    script, _, function = text.rpartition(":")
    if script.endswith(".py") or text.endswith(".py"):
        return _script(script or text, function if script else "")
    path = Path(text)
    if path.is_dir():
        return _read_folder(path)
    if is_hub_name(text):
        return replace(_read_folder(hub_folder(text)), named=text)
    if path.exists() or path.suffix == ".json":
        return _Source(path=path, model=_described(path) if _is_known(path) else None)
    return _sized(text)


def _script(script: str, function: str) -> _Source:
    """Return a function of a script as what builds the model."""
    if not function.isidentifier():
        msg = f"{script}: {function!r} is not a function's name" if function else f"{script} names no function"
        raise UsageError(msg, hint=f"name the one that builds the model: {script}:build_model")
    if not Path(script).is_file():
        msg = f"script not found: {script}"
        raise UsageError(msg)
    return _Source(path=Path(script), function=function, named=f"{script}:{function}")


def _sized(text: str) -> _Source:
    """Return a llama of a size such as 8b."""
    if text.isdecimal() and int(text) < FEWEST_PARAMETERS:
        msg = f"{text} needs a unit, as in {text}b or {text}m"
        raise UsageError(msg)
    try:
        parameters = parse_count(text)
    except ValueError:
        msg = f"{text}: no such file, and not the size of a model"
        hint = "a size has a unit, such as 8b; a model of the hub is named org/model"
        raise UsageError(msg, hint=hint) from None
    if parameters > MOST_PARAMETERS:
        msg = f"{quoted(text)} is larger than the largest llama that is estimated, of {MOST_PARAMETERS // 10**12}t"
        raise UsageError(msg, hint="describe the model: CONFIG.json or SCRIPT.py:FUNCTION")
    config = llama_of(parameters)
    model = describe(config, source=f"a llama of {text}")
    path = make_process_dir() / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    shape = f"{config['num_hidden_layers']} blocks of width {config['hidden_size']}"
    note = f"{text} is estimated as a llama of {short_count(model.sizes.parameters)} parameters, {shape}"
    return _Source(path=path, model=model, notes=(note,), named=f"a llama of {text}")


def _read_folder(folder: Path) -> _Source:
    """Return a model folder: sizes from its headers, activations from its config.json; either is enough."""
    config = folder / "config.json"
    described = _described(config) if config.is_file() and _is_known(config) else None
    if not weight_files(folder):
        if not config.is_file():
            msg = f"{folder} holds no *.safetensors file and no config.json"
            raise UsageError(msg, hint="give a model folder")
        return _Source(path=config, model=described or _described(config))
    sizes = read_sizes(folder)
    notes: tuple[str, ...] = ()
    if described is not None and described.sizes.parameters != sizes.parameters:
        counted = (short_count(sizes.parameters), short_count(described.sizes.parameters))
        notes = ("the files hold {} parameters, config.json describes {}: the files count".format(*counted),)
    return _Source(
        path=config, model=Model(sizes=sizes, shape=described.shape if described else None), notes=notes
    )


def _described(path: Path) -> Model:
    return describe(read_json_file(path), source=str(path))


def _is_known(path: Path) -> bool:
    kind = read_json_file(path).get("model_type")
    return isinstance(kind, str) and kind in FAMILIES


def _words(model: Model, setup: TrainingSetup) -> str:
    sizes = model.sizes
    kinds = {1: "fp8", 2: "bf16", 4: "fp32", 8: "fp64"}
    master, compute, _ = setup.widths(sizes)
    dtypes = f"{kinds.get(master, master)} kept, {kinds.get(compute, compute)} computed"
    blocks = f"{sizes.depth} blocks" if sizes.blocks else "no repeated blocks"
    return (
        f"{short_count(sizes.parameters)} parameters, {blocks} ({sizes.source}); {dtypes}, {setup.optimizer}; "
        f"{setup.batch_size} x {setup.length} tokens per rank"
        + (", checkpointing" if setup.checkpoint_every else "")
    )
