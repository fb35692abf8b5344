"""Build the model to be traced, and a batch for it. Runs in the tracing process, under torch's fake tensors."""

import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdplaunch.errors import UsageError

Batch = Mapping[str, Any] | tuple[Any, ...]
_NAME = "fsdplaunch_built_model"


def build_from_script(script: Path, function: str) -> Any:
    """Import a script, without running it as a program, and call its function.

    Args:
        script: A Python file.
        function: Name of a function without required arguments that returns a model, or a model and a batch.

    Raises:
        UsageError: There is no such function, or it raised.
    """
    spec = importlib.util.spec_from_file_location(_NAME, script)
    if spec is None or spec.loader is None:
        msg = f"{script} is no Python file"
        raise UsageError(msg)
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module
    sys.path.insert(0, str(script.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        msg = f"importing {script} raised {_words(error, script)}"
        raise UsageError(msg, hint="keep what trains below `if __name__ == '__main__':`") from error
    made = getattr(module, function, None)
    if not callable(made):
        names = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        msg = f"{script} has no function {function}"
        raise UsageError(msg, hint=f"functions there: {', '.join(names) or 'none'}")
    try:
        return made()
    except (Exception, SystemExit) as error:
        msg = f"{script}:{function} raised {_words(error, script)}"
        hint = "it is called without arguments and must return a model, or a model and a batch"
        raise UsageError(msg, hint=hint) from error


def _words(error: BaseException, script: Path) -> str:
    """Return `ValueError: text (line 12)`, the line being the innermost one of the script itself."""
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(script):
            line = trace.tb_lineno
        trace = trace.tb_next
    text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'without a text'}"
    return f"{text} (line {line})" if line else text


def build_from_config(path: Path) -> nn.Module:
    """Build the model of a `config.json` with the installed transformers, without weights.

    Args:
        path: The file.

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


def taken_apart(made: Any) -> tuple[nn.Module, Batch | None]:
    """Split what a function returned into a model and the batch it may come with.

    Raises:
        UsageError: It is neither.
    """
    if isinstance(made, nn.Module):
        return made, None
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):  # noqa: PLR2004
        batch = made[1]
        return made[0], batch if isinstance(batch, Mapping | tuple) else (batch,)
    msg = f"the function returned {type(made).__name__}"
    raise UsageError(msg, hint="return a torch.nn.Module, or a pair of a module and a batch")


def make_batch(model: nn.Module, *, batch_size: int, length: int) -> Batch:
    """Make a batch for a model whose forward says what it takes.

    Args:
        model: Takes `input_ids` or `pixel_values`, as transformers models do.
        batch_size: Sequences.
        length: Tokens of each.

    Raises:
        UsageError: Its forward takes something else.
    """
    names = inspect.signature(model.forward).parameters
    config: Any = getattr(model, "config", None)
    batch: dict[str, Any] = {}
    if "input_ids" in names:
        batch["input_ids"] = torch.zeros(batch_size, length, dtype=torch.int64)
        per_token = "Classification" not in type(model).__name__ or "Token" in type(model).__name__
        labels = (batch_size, length) if per_token else (batch_size,)
    elif "pixel_values" in names and config is not None:
        size = config.image_size
        dtype = next(model.parameters()).dtype
        batch["pixel_values"] = torch.zeros(batch_size, config.num_channels, size, size, dtype=dtype)
        labels = (batch_size,)
    else:
        takes = ", ".join(names)
        msg = f"forward of {type(model).__name__} takes ({takes}), and no batch is known for that"
        raise UsageError(msg, hint="let the function return a pair: the model, and a batch (a tuple or a mapping)")
    if "labels" in names:
        batch["labels"] = torch.zeros(labels, dtype=torch.int64)
    return batch


def loss_of(output: Any) -> torch.Tensor:
    """Return the scalar that a model returned, or the sum of its first tensor.

    Raises:
        UsageError: It returned no tensor that gradients can flow from.
    """
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    values = list(output.values()) if isinstance(output, Mapping) else output
    found = values if isinstance(values, list | tuple) else [values]
    tensors = [item for item in found if isinstance(item, torch.Tensor) and item.is_floating_point()]
    scalar = next((item for item in tensors if item.dim() == 0), None)
    if not tensors:
        msg = f"the model returned {type(output).__name__}, without a tensor to train on"
        raise UsageError(msg, hint="return the loss, or the outputs, from forward")
    return scalar if scalar is not None else tensors[0].float().sum()
