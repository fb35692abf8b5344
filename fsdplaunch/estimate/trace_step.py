"""Build the model to be traced, and a batch for it. Runs in the tracing process, under torch's fake tensors."""

import importlib.util
import inspect
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from fsdplaunch.errors import LaunchError, UsageError
from fsdplaunch.runtime.torch_internals.tensors import FakeTensorMode, tree_leaves

Batch = Mapping[str, Any] | tuple[Any, ...]
_NAME = "fsdplaunch_built_model"


def build_from_script(script: Path, function: str) -> Any:
    """Import a script, without running it as a program, and call a function that takes nothing.

    Raises:
        UsageError: There is no such function, or it raised.
    """
    spec = importlib.util.spec_from_file_location(_NAME, script)
    if spec is None or spec.loader is None:
        msg = f"{script} is not a Python file"
        raise UsageError(msg)
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module
    sys.path.insert(0, str(script.resolve().parent))
    hint = "keep what trains below `if __name__ == '__main__':`"
    with _naming_the_line(script, f"importing {script}", hint):
        spec.loader.exec_module(module)
    made = getattr(module, function, None)
    if not callable(made):
        names = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        msg = f"{script} has no function {function}"
        raise UsageError(msg, hint=f"functions there: {', '.join(names) or 'none'}")
    hint = "it is called without arguments and must return a model, or a model and a batch"
    with _naming_the_line(script, f"{script}:{function}", hint):
        return made()


@contextmanager
def _naming_the_line(script: Path, what: str, hint: str) -> Iterator[None]:
    """Make one error of what the user's code raises, with the innermost line of the script itself."""
    try:
        yield
    except (Exception, SystemExit) as error:
        lines = [each.lineno for each in traceback.extract_tb(error.__traceback__) if each.filename == str(script)]
        place = f" (line {lines[-1]})" if lines else ""
        msg = f"{what} raised {_words(error)}{place}"
        raise UsageError(msg, hint=hint) from error


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'without a text'}"


def build_from_config(path: Path) -> nn.Module:
    """Build the model of a `config.json` with the installed transformers, without weights.

    Raises:
        UsageError: transformers is not installed, or does not know the model.
    """
    try:
        import transformers
    except ImportError:
        msg = "the exact estimate of a config.json needs transformers, which is not installed"
        raise UsageError(msg, hint="pip install transformers, or name a function: script.py:build_model") from None
    hint = "name a function that builds it: script.py:build_model"
    try:
        config = transformers.AutoConfig.from_pretrained(str(path), local_files_only=True)
        named = (getattr(config, "architectures", None) or [""])[0]
        kind: Any = getattr(transformers, named, None) or transformers.AutoModelForCausalLM
        make = getattr(kind, "from_config", None) or kind._from_config
        dtype = getattr(config, "dtype", None) or torch.float32
        model: nn.Module = make(config, dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    except (ValueError, KeyError, OSError, TypeError, AttributeError, ImportError) as error:
        msg = f"transformers {transformers.__version__} cannot build {path}: {str(error).splitlines()[0]}"
        raise UsageError(msg, hint=hint) from error
    return model.train()


def with_batch(made: Any, *, batch_size: int, length: int) -> tuple[nn.Module, Batch]:
    """Return the model that a function made, and the batch that came with it, or one that its forward names.

    Raises:
        UsageError: It made no model, or forward takes neither `input_ids` nor `pixel_values`, as transformers'
            models do.
    """
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):  # noqa: PLR2004
        return made[0], made[1] if isinstance(made[1], Mapping | tuple) else (made[1],)
    if not isinstance(made, nn.Module):
        msg = f"the function returned {type(made).__name__}"
        raise UsageError(msg, hint="return a torch.nn.Module, or a pair of a module and a batch")
    names = inspect.signature(made.forward).parameters
    config: Any = getattr(made, "config", None)
    batch: dict[str, Any] = {}
    labels: tuple[int, ...] = (batch_size,)
    if "input_ids" in names:
        batch["input_ids"] = torch.zeros(batch_size, length, dtype=torch.int64)
        if "Classification" not in type(made).__name__ or "Token" in type(made).__name__:
            labels = (batch_size, length)
    elif "pixel_values" in names and config is not None:
        shape = batch_size, config.num_channels, config.image_size, config.image_size
        batch["pixel_values"] = torch.zeros(shape, dtype=next(made.parameters()).dtype)
    else:
        msg = f"forward of {type(made).__name__} takes ({', '.join(names)}), and no batch is known for that"
        raise UsageError(msg, hint="let the function return a pair: the model, and a batch (a tuple or a mapping)")
    if "labels" in names:
        batch["labels"] = torch.zeros(labels, dtype=torch.int64)
    return made, batch


def _loss_of(output: Any) -> torch.Tensor:
    """Return the scalar that a model returned, or the sum of its first tensor."""
    leaves = [getattr(output, "loss", None), *tree_leaves(dict(output) if isinstance(output, Mapping) else output)]
    tensors = [item for item in leaves if isinstance(item, torch.Tensor) and item.is_floating_point()]
    if not tensors:
        msg = f"the model returned {type(output).__name__}, without a tensor to train on"
        raise UsageError(msg, hint="return the loss, or the outputs, from forward")
    scalar = next((item for item in tensors if item.dim() == 0), None)
    return scalar if scalar is not None else tensors[0].float().sum()


@contextmanager
def _fake_ranks(world: int, per_node: int) -> Iterator[None]:
    """Be rank 0 of `world` ranks for as long as the context lasts."""
    from fsdplaunch.runtime.sharding import checks
    from fsdplaunch.runtime.torch_internals.distributed import fake_store
    from fsdplaunch.runtime.torch_internals.fsdp import first_chunk_only

    def keep(*_: Any, **__: Any) -> None:
        """Leave everything as it is: ours is what the first rank sends."""

    def repeat(answers: list[Any], mine: Any, **_: Any) -> None:
        answers[:] = [mine] * len(answers)

    def first_part(tensor: torch.Tensor, num_chunks: int, dim: int) -> list[torch.Tensor]:
        """Make only the first rank's part of a parameter; torch makes those of all ranks and keeps one.

        With 1,024 ranks and 700 parameters these parts are most of the time that tracing takes.
        """
        return [tensor.narrow(dim, 0, -(-tensor.size(dim) // num_chunks))]

    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(per_node)}
    dist.init_process_group("fake", rank=0, world_size=world, store=fake_store())
    try:
        with (
            patch.dict(os.environ, ranks),
            patch.object(dist, "broadcast_object_list", keep),
            patch.object(dist, "all_gather_object", repeat),
            patch.object(dist, "broadcast", keep),
            patch.object(checks, "check_sharded_model", keep),  # adds up the shards of all ranks
            first_chunk_only(first_part),
        ):
            yield
    finally:
        dist.destroy_process_group()


_PARTS = {
    "Sharded Param": "parameters",
    "Buffer": "parameters",
    "Sharded Grad": "gradients",
    "OptState": "optimizer",
    "Unsharded Param": "gathered",
    "All Gather": "communication",
    "Reduce Scatter": "communication",
    "Unsharded Grad": "temporary",
    "Temp": "temporary",
    "Activation": "activations",
    "Inputs": "activations",
}
"""The tracker's kinds of memory, and the part of ours that each belongs to."""
_OPTIMIZERS: Mapping[str, Any] = {
    "adamw": lambda params: torch.optim.AdamW(params, foreach=False),
    "adam": lambda params: torch.optim.Adam(params, foreach=False),
    "nadam": lambda params: torch.optim.NAdam(params, foreach=False),
    "adagrad": lambda params: torch.optim.Adagrad(params, foreach=False),
    "rmsprop": lambda params: torch.optim.RMSprop(params, foreach=False),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, foreach=False),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.01, foreach=False),
}


def trace(request: Mapping[str, Any]) -> dict[str, Any]:
    """Answer one request: source (config or script and function), world, per_node, batch_size, length, optimizer.

    Returns:
        Bytes at the peak by what they are for, the model's tensors and units, seconds.

    Raises:
        LaunchError: The model cannot be built, sharded or traced.
    """
    began = time.monotonic()
    with _fake_ranks(request["world"], request["per_node"]):
        from fsdplaunch.runtime.plugin import ambient_plugin
        from fsdplaunch.runtime.sharding.mesh import make_mesh

        plugin = ambient_plugin()
        mesh = make_mesh(plugin.settings(), torch.device("cpu"))
        with FakeTensorMode(allow_non_fake_inputs=True):
            answer = _trace_step(request, plugin, mesh)
    return {**answer, "seconds": round(time.monotonic() - began, 2)}


def _trace_step(request: Mapping[str, Any], plugin: Any, mesh: Any) -> dict[str, Any]:
    from fsdplaunch.runtime.api.prepare import prepare
    from fsdplaunch.runtime.sharding.registry import registered

    source, function = Path(request["source"]), request["function"]
    made = build_from_script(source, function) if function else build_from_config(source)
    model, batch = with_batch(made, batch_size=request["batch_size"], length=request["length"])
    tensors = {name: [list(param.shape), param.element_size()] for name, param in model.named_parameters()}
    model = prepare(model, plugin=plugin, mesh=mesh)
    prepared = registered(model)
    make_optimizer = _OPTIMIZERS[request["optimizer"]]
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer, trial = make_optimizer(trained), make_optimizer([trained[0]])
    # Every parameter is given the state it has after the first step: as the optimizer makes it for one of them.
    trained[0].grad = torch.zeros_like(trained[0])
    trial.step()
    trained[0].grad = None
    made_state = [(k, v) for k, v in trial.state[trained[0]].items() if isinstance(v, torch.Tensor)]
    for param in trained:
        optimizer.state[param] = {
            name: torch.zeros_like(param, dtype=value.dtype) if value.shape == trained[0].shape else value.clone()
            for name, value in made_state
        }
    from fsdplaunch.runtime.torch_internals.fsdp import memory_tracker

    tracker = memory_tracker(model, optimizer)
    tracker.track_inputs(tuple(batch.values()) if isinstance(batch, Mapping) else batch)
    fused = torch.nn.functional.scaled_dot_product_attention

    def attention(*tensors: Any, dropout_p: float = 0.0, **options: Any) -> torch.Tensor:
        """Let dropout not keep attention from its fused kernel: GPUs have one with dropout, the CPU has not.

        Without it every attention weight would be counted as kept for backward.
        """
        del dropout_p
        return fused(*tensors, **options)

    with patch.object(torch.nn.functional, "scaled_dot_product_attention", attention), tracker:
        _step(model, batch, optimizer)
    peak = next(iter(tracker.get_tracker_snapshot("peak").values()))
    parts = dict.fromkeys(_PARTS.values(), 0)
    for kind, amount in peak.items():
        if (name := str(getattr(kind, "value", kind))) != "Total":
            parts[_PARTS[name]] += amount
    return {"parts": parts, "tensors": tensors, "units": list(prepared.units) if prepared else []}


def _step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> None:
    phase = "forward"
    try:
        output = model(**batch) if isinstance(batch, Mapping) else model(*batch)
        loss = _loss_of(output)  # the outputs live on, as they do in most training loops
        phase = "backward"
        loss.backward()
        del loss
        phase = "step"
        optimizer.step()
    except LaunchError:
        raise
    except Exception as error:
        msg = f"the {phase} of {type(model).__name__} cannot be traced: {_words(error)}"
        hint = "what depends on tensors' values (.item(), if tensor:) has none here; leave --exact out"
        raise UsageError(msg, hint=hint) from error


def main(argv: list[str]) -> None:
    """Read a request, write the answer or the error; `argv` are the paths of both."""
    torch.set_num_threads(1)
    request = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    answer: dict[str, Any]
    try:
        with redirect_stdout(sys.stderr):  # what the user's code prints is not our answer
            answer = trace(request)
    except LaunchError as error:
        answer = {"error": error.message, "hint": error.hint}
    Path(argv[1]).write_text(json.dumps(answer), encoding="utf-8")
    sys.stderr.flush()
    os._exit(0)  # freeing thousands of fake tensors one by one takes seconds and frees nothing


if __name__ == "__main__":
    main(sys.argv[1:])
