"""`fsdplaunch estimate`: will it fit, and what to change if not. Torch, if needed, has a process of its own."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdplaunch.cli.output import Output
from fsdplaunch.config.load import LoadedConfig, load_config
from fsdplaunch.config.resolve import uses_xla
from fsdplaunch.display_text import quoted
from fsdplaunch.errors import UsageError
from fsdplaunch.estimate.memory import LENGTH, MemoryCase, TrainingSetup, ranks_of, training_setup
from fsdplaunch.estimate.model import (
    MOST_PARAMETERS,
    DescribedModel,
    describe,
    llama_of,
    read_architecture,
    read_json_file,
    read_sizes,
)
from fsdplaunch.estimate.report import Report, make_report, text_report
from fsdplaunch.private_dir import make_process_dir
from fsdplaunch.probe.hardware import Hardware, read_hardware
from fsdplaunch.probe.model_files import (
    find_model,
    hub_folder,
    is_hub_name,
    parse_count,
    short_count,
    weight_files,
)

_OTHER_MEMORY = ("this is for torch's FSDP on GPUs; PyTorch/XLA's memory on TPUs is another",)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """What was named: a file to build from, the function in it, what could be read without building, a name."""

    path: Path
    function: str = ""
    case: MemoryCase | None = None
    notes: tuple[str, ...] = ()
    named: str = ""


def estimate(
    *,
    source: str | None,
    file: Path | None,
    overrides: Sequence[str],
    as_json: bool,
    out: Output,
    **wanted: Any,
) -> int:
    """Say what a run needs, and whether it fits; `wanted` is what `_report` takes.

    Returns:
        0, whether it fits or not: the answer is the output.

    Raises:
        LaunchError: It cannot be estimated.
    """
    loaded = load_config(file, overrides=overrides)
    hardware = read_hardware(os.environ)
    report = _report(loaded, hardware, _read_source(source), out, **wanted)
    if as_json:
        out.json(report.to_dict())
    else:
        out.data("\n".join(text_report(report)))
    return 0


def _read_source(text: str | None) -> _Source:
    """Read what was named, as far as that needs no torch."""
    if text is None:
        found = find_model(Path.cwd())
        if found is None:
            msg = "no model was named, and no folder here holds *.safetensors"
            raise UsageError(msg, hint="fsdplaunch estimate MODEL_DIR, CONFIG.json or SCRIPT.py:FUNCTION")
        text = str(found)
    script, colon, function = text.rpartition(":")
    if colon and script.endswith(".py"):
        if not Path(script).is_file():
            msg = f"script not found: {script}"
            raise UsageError(msg)
        if not function.isidentifier():
            msg = f"{text!r}: {function!r} is not a function's name"
            raise UsageError(msg, hint="write SCRIPT.py:FUNCTION")
        return _Source(path=Path(script), function=function)
    if text.endswith(".py"):
        msg = f"{text} names no function"
        raise UsageError(msg, hint=f"name the one that builds the model: {text}:build_model")
    return _read_model(text)


def _read_model(text: str) -> _Source:
    """Read a model that is a folder, a hub name, a size or a config.json."""
    path = Path(text)
    if path.is_dir():
        return _read_folder(path)
    if is_hub_name(text):
        return replace(_read_folder(hub_folder(text)), named=text)
    if not path.exists() and (sized := _sized(text)) is not None:
        return sized
    return _Source(path=path, case=_described(read_architecture(path)) if _is_known(path) else None)


def _sized(text: str) -> _Source | None:
    """Return a llama of a size such as 8b; None where the text is not a size."""
    try:
        parameters = parse_count(text)
    except ValueError:
        return None
    if parameters > MOST_PARAMETERS:
        msg = f"{quoted(text)} is larger than the largest llama that is estimated, of {MOST_PARAMETERS // 10**12}t"
        raise UsageError(msg, hint="describe the model: CONFIG.json or SCRIPT.py:FUNCTION")
    config = llama_of(parameters)
    described = describe(config, source=f"a llama of {text}")
    folder = make_process_dir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shape = f"{config['num_hidden_layers']} blocks of width {config['hidden_size']}"
    notes = (f"{text} is estimated as a llama of {short_count(described.sizes.parameters)} parameters, {shape}",)
    return _Source(
        path=folder / "config.json", case=_described(described), notes=notes, named=f"a llama of {text}"
    )


def _read_folder(folder: Path) -> _Source:
    """Return a model folder: sizes from its headers, activations from its config.json; either is enough."""
    config = folder / "config.json"
    known = config.is_file() and _is_known(config)
    described = read_architecture(config) if known else None
    if not weight_files(folder):
        if not config.is_file():
            msg = f"{folder} holds no *.safetensors file and no config.json"
            raise UsageError(msg, hint="give a model folder")
        return _Source(path=config, case=_described(read_architecture(config)))
    sizes = read_sizes(folder)
    notes: tuple[str, ...] = ()
    if described is not None and described.sizes.parameters != sizes.parameters:
        counted = (short_count(sizes.parameters), short_count(described.sizes.parameters))
        notes = ("the files hold {} parameters, config.json describes {}: the files count".format(*counted),)
    return _Source(
        path=config, case=MemoryCase(sizes=sizes, shape=described.shape if described else None), notes=notes
    )


def _described(described: DescribedModel) -> MemoryCase:
    return MemoryCase(sizes=described.sizes, shape=described.shape)


def _is_known(path: Path) -> bool:
    from fsdplaunch.estimate.families import FAMILIES

    kind = read_json_file(path).get("model_type")
    return isinstance(kind, str) and kind in FAMILIES


def _report(
    loaded: LoadedConfig,
    hardware: Hardware,
    source: _Source,
    out: Output,
    *,
    world_size: int | None,
    gpu_memory: int | None,
    batch_size: int,
    seq_len: int | None,
    optimizer: str,
    exact: bool,
) -> Report:
    config = loaded.config
    gpus = 0 if config.use_cpu else len(hardware.gpus)
    world, per_node = ranks_of(config, gpus=gpus, given=world_size)
    traced = exact or bool(source.function)
    if source.case is None and not traced:
        read_architecture(source.path)  # says why it is not known
    shape = source.case.shape if source.case else None
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
    case, trace = source.case, None
    if traced:
        from fsdplaunch.estimate.trace_client import trace_step

        out.say("tracing one step; this needs torch and takes seconds, or a minute for a large model")
        trace = trace_step(
            config, source=str(source.path), function=source.function, world=world, per_node=per_node,
            batch_size=setup.batch_size, length=setup.length, optimizer=setup.optimizer,
        )  # fmt: skip
        case = MemoryCase(sizes=trace.sizes, shape=shape)
    if case is None:
        raise UsageError(str(source.path))
    memory = gpu_memory or hardware.gpu_memory_bytes
    return make_report(
        case, setup, title=_title(source, loaded, setup), model=_model_words(case, setup), memory=memory,
        memory_from="--gpu-memory" if gpu_memory else "the smallest GPU here",
        host_memory=hardware.memory_bytes if hardware.gpus else None, exact=trace,
        notes=(*source.notes, *(_OTHER_MEMORY if uses_xla(config) else ()), *loaded.note_lines()),
    )  # fmt: skip


def _title(source: _Source, loaded: LoadedConfig, setup: TrainingSetup) -> str:
    named = f"{source.path}:{source.function}" if source.function else str(source.path.parent)
    if source.path.name != "config.json" and not source.function:
        named = str(source.path)
    named = source.named or named
    file = str(loaded.path) if loaded.path else "the built-in defaults"
    ranks = f"{setup.world} rank{'s' if setup.world != 1 else ''}"
    place = f"{ranks}, {setup.per_node} per node" if setup.world > setup.per_node else ranks
    return f"{named} with {file} on {place}"


def _model_words(case: MemoryCase, setup: TrainingSetup) -> str:
    sizes = case.sizes
    kinds = {1: "fp8", 2: "bf16", 4: "fp32", 8: "fp64"}
    master, compute, _ = setup.widths(sizes)
    dtypes = f"{kinds.get(master, master)} kept, {kinds.get(compute, compute)} computed"
    blocks = f"{sizes.depth} blocks" if sizes.blocks else "no repeated blocks"
    return (
        f"{short_count(sizes.parameters)} parameters, {blocks} ({sizes.source}); {dtypes}, {setup.optimizer}; "
        f"{setup.batch_size} x {setup.length} tokens per rank" + (", checkpointing" if setup.checkpointing else "")
    )
