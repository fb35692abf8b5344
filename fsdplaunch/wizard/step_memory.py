"""What a whole training step would need with the answers so far, where the model's folder says enough."""

from collections.abc import Iterator

from fsdplaunch.config.keys import build_config
from fsdplaunch.config.resolve import resolve
from fsdplaunch.errors import UsageError
from fsdplaunch.estimate.advice import verdict_of
from fsdplaunch.estimate.architecture import read_architecture
from fsdplaunch.estimate.need import need_of
from fsdplaunch.estimate.setup import setup_of
from fsdplaunch.estimate.sizes import read_sizes
from fsdplaunch.probe.hardware import GIB
from fsdplaunch.wizard.compose import compose
from fsdplaunch.wizard.situation import Situation

_LENGTH = 2048


def step_words(situation: Situation) -> Iterator[str]:
    """Yield a line about the memory of one step, activations included; nothing where it cannot be said.

    Args:
        situation: With all answers.
    """
    model, workers = situation.machines.model, situation.workers
    if model is None or model.folder is None or workers is None or situation.answers.get("where") == "cpu":
        return
    try:
        shape = read_architecture(model.folder / "config.json").shape
        config = resolve(build_config(compose(situation)))
        setup = setup_of(
            config,
            world=workers * situation.num_nodes,
            per_node=workers,
            batch_size=1,
            length=min(shape.max_length or _LENGTH, _LENGTH),
            optimizer="adamw",
            on_gpu=True,
        )
        need = need_of(read_sizes(model.folder), shape, setup)
    except UsageError:
        return  # a family that is not known, or a mesh that a rule refuses in its own words
    memory = situation.machines.hardware.gpu_memory_bytes
    verdict = verdict_of(need.gpu, memory)
    limit = f" of {memory / GIB:.0f}" if memory else ""
    said = f" ({verdict})" if verdict != "unknown" else ""
    yield (
        f"One step of 1 x {setup.length} tokens per worker: {need.gpu / GIB:.1f}{limit} GiB per GPU{said}; "
        f"fsdplaunch estimate {model.folder} says more."
    )
