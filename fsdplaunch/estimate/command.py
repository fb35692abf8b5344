"""`fsdplaunch estimate`: will it fit, and what to change if not. Torch, if needed, has a process of its own."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fsdplaunch.cli.output import Output
from fsdplaunch.config.load import load_config
from fsdplaunch.config.resolve import uses_xla
from fsdplaunch.config.schema.config import Config
from fsdplaunch.display_text import counted, quoted, short_count
from fsdplaunch.errors import UsageError
from fsdplaunch.estimate.build import built_sizes
from fsdplaunch.estimate.memory import LENGTH, MemoryNeed, TrainingSetup, memory_need, ranks_of, training_setup
from fsdplaunch.estimate.model import (
    FAMILIES,
    MOST_PARAMETERS,
    Model,
    describe,
    llama_of,
    read_json_file,
    read_sizes,
)
from fsdplaunch.estimate.report import Report, text_report
from fsdplaunch.probe.hardware import read_hardware
from fsdplaunch.probe.model_files import (
    FEWEST_PARAMETERS,
    find_model,
    hub_folder,
    is_hub_name,
    parse_count,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """A model that was named."""

    model: Model
    named: str  # in words
    notes: tuple[str, ...] = ()  # what is to be said of it


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
    as_json: bool,
    out: Output,
) -> int:
    """Say what a run needs, and whether it fits; 0 in both cases, for the answer is the output."""
    loaded, hardware, found = load_config(file, overrides=overrides), read_hardware(os.environ), read_named(source)
    config, model = loaded.config, found.model
    world, per_node = ranks_of(config, gpus=0 if config.use_cpu else len(hardware.gpus), given=world_size)
    longest = model.shape.max_length if model.shape is not None and model.shape.max_length else LENGTH
    setup = training_setup(
        config,
        world=world,
        per_node=per_node,
        batch_size=batch_size,
        length=seq_len or min(longest, LENGTH),
        optimizer=optimizer,
        on_gpu=not config.use_cpu,
    )
    file_name = str(loaded.path) if loaded.path else "the built-in defaults"
    ranks = counted(setup.world, "rank")
    place = f"{ranks}, {setup.per_node} per node" if setup.world > setup.per_node else ranks
    report = Report(
        title=f"{found.named} with {file_name} on {place}", words=_words(model, setup), model=model, setup=setup,
        memory=gpu_memory or hardware.gpu_memory_bytes,
        memory_from="--gpu-memory" if gpu_memory else "the smallest GPU here",
        host_memory=hardware.memory_bytes if hardware.gpus else None,
        said_first=(*found.notes, *_notes(config, model, setup), *loaded.note_lines()),
    )  # fmt: skip
    if as_json:
        out.json(report.to_dict())
    else:
        out.data("\n".join(text_report(report)))
    return 0


def _notes(config: Config, model: Model, setup: TrainingSetup) -> Iterator[str]:
    if uses_xla(config):
        yield "this is for torch's FSDP on GPUs; PyTorch/XLA's memory on TPUs differs"
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


def read_named(text: str | None) -> NamedModel:
    """Read what was named; only a script's function needs torch for it."""
    if text is None:
        newest = find_model(Path.cwd())
        if newest is None:
            msg = "no model was named, and no folder here holds *.safetensors"
            raise UsageError(msg, hint="fsdplaunch estimate MODEL_DIR, CONFIG.json or SCRIPT.py:FUNCTION")
        found = _read_folder(newest, str(newest))
        return replace(found, notes=(f"no model was named: {newest} has the newest weights here", *found.notes))
    script, _, function = text.rpartition(":")
    if script.endswith(".py") or text.endswith(".py"):
        return _read_script(script or text, function if script else "")
    path = Path(text)
    if path.is_dir():
        return _read_folder(path, text)
    if is_hub_name(text):
        return _read_folder(hub_folder(text), text)
    if path.exists() or path.suffix == ".json":
        return NamedModel(model=_described(path), named=str(path.parent if path.name == "config.json" else path))
    return _sized(text)


def _read_script(script: str, function: str) -> NamedModel:
    if not function.isidentifier():
        msg = f"{script}: {function!r} is not a function's name" if function else f"{script} names no function"
        raise UsageError(msg, hint=f"name the one that builds the model: {script}:build_model")
    if not Path(script).is_file():
        msg = f"script not found: {script}"
        raise UsageError(msg)
    return NamedModel(
        model=Model(sizes=built_sizes(Path(script), function), shape=None), named=f"{script}:{function}"
    )


def _sized(text: str) -> NamedModel:
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
        msg = (
            f"{quoted(text)} is larger than the largest llama that can be estimated, {MOST_PARAMETERS // 10**12}t"
        )
        raise UsageError(msg, hint="describe the model: CONFIG.json or SCRIPT.py:FUNCTION")
    config = llama_of(parameters)
    model = describe(config, source=f"a llama of {text}")
    shape = f"{config['num_hidden_layers']} blocks of width {config['hidden_size']}"
    note = f"{text} is estimated as a llama of {short_count(model.sizes.parameters)} parameters, {shape}"
    return NamedModel(model=model, notes=(note,), named=f"a llama of {text}")


def _read_folder(folder: Path, named: str) -> NamedModel:
    """Return a model folder: sizes from its headers, activations from its config.json; either is enough."""
    path = folder / "config.json"
    if next(folder.glob("*.safetensors"), None) is None:
        if not path.is_file():
            msg = f"{folder} holds no *.safetensors file and no config.json"
            raise UsageError(msg, hint="give a model folder")
        return NamedModel(model=_described(path), named=named)
    sizes, described = read_sizes(folder), None
    if path.is_file() and str(read_json_file(path).get("model_type")) in FAMILIES:
        described = _described(path)
    notes: tuple[str, ...] = ()
    if described is not None and described.sizes.parameters != sizes.parameters:
        counted = (short_count(sizes.parameters), short_count(described.sizes.parameters))
        notes = ("the files hold {} parameters, config.json describes {}: the files are used".format(*counted),)
    model = Model(sizes=sizes, shape=described.shape if described else None)
    return NamedModel(model=model, notes=notes, named=named)


def _described(path: Path) -> Model:
    return describe(read_json_file(path), source=str(path))


def before_activations(
    model: Model, *, ranks: int, mixed: bool, keeps: bool = False, offload: bool = False, on_gpu: bool = True
) -> MemoryNeed:
    """Count what a rank needs beside activations; in mixed precision fp32 is kept and two bytes are gathered."""
    setup = TrainingSetup(
        strategy="FULL_SHARD",
        world=ranks,
        per_node=ranks,
        shards=ranks,
        keeps=int(keeps),
        master=4 if mixed else 0,
        compute=2 if mixed else 0,
        reduce=4 if mixed else 0,
        offload=offload,
        on_gpu=on_gpu,
    )
    return memory_need(replace(model, shape=None), setup)


def _words(model: Model, setup: TrainingSetup) -> str:
    sizes = model.sizes
    kinds = {1: "fp8", 2: "bf16", 4: "fp32", 8: "fp64"}
    master, compute, _ = setup.widths(sizes)
    dtypes = f"{kinds.get(master, master)} weights, {kinds.get(compute, compute)} compute"
    return f"{sizes.words}; {dtypes}, {setup.optimizer}; {setup.batch_size} x {setup.length} tokens per rank" + (
        ", checkpointing" if setup.checkpoint_every else ""
    )
