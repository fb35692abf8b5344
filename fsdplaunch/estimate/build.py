"""The tensors of a model that a function of a script builds, without storage, in a process that has torch."""

import importlib.util
import inspect
import json
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from fsdplaunch.errors import LaunchError, UsageError
from fsdplaunch.estimate.model import ModelSizes, TensorSize, model_sizes
from fsdplaunch.parent_death import ended_with_us
from fsdplaunch.private_dir import make_process_dir

_NAME = "fsdplaunch_built_model"


def built_sizes(script: Path, function: str) -> ModelSizes:
    """Return the sizes of the model that a function of a script builds."""
    answer_file = make_process_dir() / "answer.json"
    command = [sys.executable, "-m", "fsdplaunch.estimate.build", str(script), function, str(answer_file)]
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", check=False, preexec_fn=ended_with_us()
    )
    if not answer_file.is_file():
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        ended = f"was killed by signal {-done.returncode}" if done.returncode < 0 else "failed"
        msg = (
            f"the process that builds {script}:{function} {ended}: {lines[-1] if lines else 'it printed nothing'}"
        )
        raise LaunchError(msg, hint="save the model to a folder, and estimate that")
    answer: dict[str, Any] = json.loads(answer_file.read_text(encoding="utf-8"))
    if "error" in answer:
        raise UsageError(answer["error"], hint=answer["hint"])
    tensors = {name: TensorSize(tuple(shape), width) for name, (shape, width) in answer["tensors"].items()}
    return model_sizes(tensors, f"{script}:{function}")


def build(script: Path, function: str) -> dict[str, Any]:
    """Import a script, without running it as a program, and return shape and width of its model's parameters."""
    import torch

    spec = importlib.util.spec_from_file_location(_NAME, script)
    if spec is None or spec.loader is None:
        msg = f"{script} is not a Python file"
        raise UsageError(msg)
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module
    sys.path.insert(0, str(script.resolve().parent))
    with _naming_the_line(
        script, f"importing {script}", "put the training code under `if __name__ == '__main__':`"
    ):
        spec.loader.exec_module(module)
    build_model = getattr(module, function, None)
    if not callable(build_model):
        names = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        msg = f"{script} has no function {function}"
        raise UsageError(msg, hint=f"functions there: {', '.join(names) or 'none'}")
    hint = "it is called without arguments, on the meta device, and must return a torch.nn.Module"
    with _naming_the_line(script, f"{script}:{function}", hint), torch.device("meta"):
        model = build_model()
    model = model[0] if isinstance(model, tuple) and model else model  # with a batch, or an optimizer
    if not isinstance(model, torch.nn.Module):
        msg = f"the function returned {type(model).__name__}"
        raise UsageError(msg, hint=hint)
    return {name: [list(param.shape), param.element_size()] for name, param in model.named_parameters()}


@contextmanager
def _naming_the_line(script: Path, what: str, hint: str) -> Iterator[None]:
    """Make one error of what the user's code raises, with the innermost line of the script itself."""
    try:
        yield
    except (Exception, SystemExit) as error:
        lines = [each.lineno for each in traceback.extract_tb(error.__traceback__) if each.filename == str(script)]
        place = f" (line {lines[-1]})" if lines else ""
        words = str(error).splitlines()[0] if str(error) else "without a message"
        msg = f"{what} raised {type(error).__name__}: {words}{place}"
        raise UsageError(msg, hint=hint) from error


def main(argv: list[str]) -> None:
    """Build what the first two words name, and write the answer or the error into the third."""
    answer: dict[str, Any]
    try:
        with redirect_stdout(sys.stderr):  # what the user's code prints is not our answer
            answer = {"tensors": build(Path(argv[0]), argv[1])}
    except LaunchError as error:
        answer = {"error": error.message, "hint": error.hint}
    Path(argv[2]).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
