"""What a full training step would need with the answers so far, where the model's folder says enough."""

import shlex
from collections.abc import Iterator

from fsdplaunch.byte_sizes import GIB
from fsdplaunch.config.resolve import resolve
from fsdplaunch.config.schema.walk import build_config
from fsdplaunch.errors import UsageError
from fsdplaunch.estimate.hf_config import read_architecture
from fsdplaunch.estimate.memory import memory_need, verdict_of
from fsdplaunch.estimate.model_sizes import read_sizes
from fsdplaunch.estimate.training_setup import training_setup
from fsdplaunch.wizard.compose import compose
from fsdplaunch.wizard.state import WizardState

_LENGTH = 2048


def step_words(state: WizardState) -> Iterator[str]:
    """Yield a line about the memory of one step, activations included; nothing where it is not known.

    Args:
        state: With all answers.
    """
    model, workers = state.run_facts.model, state.workers
    if model is None or model.folder is None or workers is None or state.answers.get("where") == "cpu":
        return
    try:
        shape = read_architecture(model.folder / "config.json").shape
        config = resolve(build_config(compose(state)))
        setup = training_setup(
            config,
            world=workers * state.num_nodes,
            per_node=workers,
            batch_size=1,
            length=min(shape.max_length or _LENGTH, _LENGTH),
            optimizer="adamw",
            on_gpu=True,
        )
        need = memory_need(read_sizes(model.folder), shape, setup)
    except UsageError:
        return  # a family that is not known, or a mesh that a rule refuses in its own words
    memory = state.run_facts.hardware.gpu_memory_bytes
    verdict = verdict_of(need.gpu, memory)
    limit = f" of {memory / GIB:.0f}" if memory else ""
    fits = f" ({verdict})" if verdict != "unknown" else ""
    yield (
        f"One step of 1 x {setup.length} tokens per worker: {need.gpu / GIB:.1f}{limit} GiB per GPU{fits}; "
        f"fsdplaunch estimate {shlex.quote(str(model.folder))} says more."
    )
