"""The estimates against what they estimate: transformers' own parameters, and the memory a real step allocates."""

import json
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdplaunch
from fsdplaunch import FullyShardedDataParallelPlugin
from fsdplaunch.config.load import stack
from fsdplaunch.config.yaml_text import YamlText
from fsdplaunch.errors import UsageError
from fsdplaunch.estimate.families import FAMILIES
from fsdplaunch.estimate.memory import MemoryNeed, memory_need, training_setup
from fsdplaunch.estimate.model import describe, read_json_file
from fsdplaunch.estimate.trace_client import StepTrace, trace_step
from fsdplaunch.estimate.trace_step import build_from_config, build_from_script, with_batch
from tests.distributed.pool import RankPool
from tests.needs import has

SMALL = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 1000, "intermediate_size": 96, "n_embd": 64, "n_layer": 3, "n_head": 4,
    "moe_intermediate_size": 48, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "pad_token_id": 0,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 704,
    "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 4, "vocab_size": 4096,
    "max_position_embeddings": 1024, "tie_word_embeddings": False, "dtype": "float32",
}  # fmt: skip
BATCH, LENGTH = 2, 256


FUSED = ("mixtral", "qwen3_moe")


def elements(shapes: Counter[tuple[int, ...]]) -> Counter[tuple[int, ...]]:
    """All elements of some shapes, as one."""
    return Counter({(): sum(prod(shape) * count for shape, count in shapes.items())})


def small_config(kind: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    known = CONFIG_MAPPING[kind]().to_dict() | {
        name: 0 for name in ("n_embd", "n_layer", "n_head") if kind == "gpt2"
    }
    gpt2 = ("n_embd", "n_layer", "n_head", "vocab_size")
    names = gpt2 if kind == "gpt2" else [name for name in SMALL if name in known]
    return CONFIG_MAPPING[kind](**{name: SMALL[name] for name in names})


@pytest.mark.parametrize("kind", FAMILIES)
def test_parameters_of_every_family_are_those_transformers_builds(kind: str) -> None:
    import transformers

    tried = 0
    for name in (
        "AutoModelForCausalLM", "AutoModelForSequenceClassification", "AutoModel",
    ):  # fmt: skip
        try:
            with torch.device("meta"):
                model = getattr(transformers, name).from_config(small_config(kind))
        except ValueError:
            continue  # the family has no such head
        data = json.loads(model.config.to_json_string(use_diff=False)) | {"architectures": [type(model).__name__]}
        sizes = describe(data, source=kind).sizes
        built = Counter(tuple(param.shape) for param in model.parameters())
        expected = Counter(tensor.shape for tensor in sizes.names.values())
        if kind in FUSED and not has("transformers", "5.0"):  # there each expert has matrices of its own
            expected, built = elements(expected), elements(built)
        assert expected == built, type(model).__name__
        tried += 1
    assert tried >= 2


def config_of(*overrides: str) -> Any:
    return stack(YamlText("test"), overrides=overrides).config


def both(path: Path, world: int, *overrides: str, function: str = "") -> tuple[StepTrace, MemoryNeed | None]:
    """The traced and the calculated estimate of a run on CPU."""
    config = config_of("use_cpu=true", *overrides)
    setup = training_setup(
        config,
        world=world,
        per_node=min(world, 8),
        batch_size=BATCH,
        length=LENGTH,
        optimizer="adamw",
        on_gpu=False,
    )
    trace = trace_step(config, setup, source=str(path), function=function)
    return trace, None if function else memory_need(describe(read_json_file(path), source="llama"), setup)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama") / "config.json"
    path.write_text(json.dumps(LLAMA))
    return path


def measured_peak(path: str, fields: dict[str, Any]) -> int:
    """Bytes torch's CPU allocator had given out at the peak of a real second step on this rank."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **fields)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)).train()
    model = fsdplaunch.prepare(model, plugin=plugin)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.int64)

    def step() -> None:
        optimizer.zero_grad()
        output = model(input_ids=ids, labels=ids)
        output.loss.backward()
        optimizer.step()

    step()
    optimizer.zero_grad()
    states = [value for state in optimizer.state.values() for value in state.values()]
    kept = [*model.parameters(), *model.buffers(), *(each for each in states if isinstance(each, torch.Tensor))]
    base = sum(local(each).numel() * each.element_size() for each in kept)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = profile.profiler.kineto_results.events()
    live = peak = 0
    for _, amount in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        live += amount
        peak = max(peak, live)
    return base + peak


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@pytest.mark.parametrize(
    ("fields", "overrides"),
    [
        ({"mixed_precision_policy": "bf16"}, ["mixed_precision=bf16"]),
        ({"activation_checkpointing": True}, ["fsdp_activation_checkpointing=true"]),
    ],
    ids=["bf16", "fp32-checkpointing"],
)
def test_estimates_are_close_to_what_a_real_step_allocates(
    two_ranks: RankPool, llama: Path, fields: dict[str, Any], overrides: list[str]
) -> None:
    two_ranks.begin(measured_peak, str(llama.parent), fields)
    trace, need = both(llama, 2, *overrides)
    real = two_ranks.wait()[0]
    assert trace.total == pytest.approx(real, rel=0.05)
    assert need is not None
    assert need.total == pytest.approx(real, rel=0.15)


def test_trace_at_a_thousand_ranks_adds_up(llama: Path) -> None:
    trace, need = both(llama, 1024, "mixed_precision=bf16", "num_processes=1024")
    assert trace.sizes.parameters == describe(LLAMA, source="llama").sizes.parameters
    assert trace.sizes.depth == 4
    assert trace.parts["optimizer"] == pytest.approx(2 * trace.parts["parameters"], rel=0.02)
    assert need is not None
    assert need.total == pytest.approx(trace.total, rel=0.15)


SCRIPT = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

print("noise on stdout")

def build():
    return Model(), torch.zeros(16, 32)

def without_batch():
    return Model()

def raises():
    raise RuntimeError("no such disk")

def wrong():
    return 3

def reads_values():
    class Branching(Model):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else x
    return Branching(), torch.zeros(16, 32)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(SCRIPT)
    return path


def test_model_of_a_script_is_built_sharded_and_traced(script: Path) -> None:
    trace, _ = both(script, 4, function="build")
    assert trace.sizes.depth == 3
    assert trace.sizes.parameters == 3 * (2 * 32 * 64 + 64 + 32)
    assert trace.parts["parameters"] == 4 * trace.sizes.parameters // 4


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("raises", r"train\.py:raises raised RuntimeError: no such disk \(line 30\)"),
        ("absent", r"train\.py has no function absent"),
        ("wrong", "the function returned int"),
        ("without_batch", r"forward of Model takes \(x\), and no batch is known"),
    ],
)
def test_function_that_builds_nothing_to_trace_is_one_error(script: Path, function: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        with_batch(build_from_script(script, function), batch_size=1, length=1)


def test_script_that_cannot_be_imported_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\nsys.exit('usage: train.py --data')\n")
    with pytest.raises(UsageError, match=r"importing .*train\.py raised SystemExit: usage: .* \(line 2\)"):
        build_from_script(tmp_path / "train.py", "build")


def test_step_that_reads_values_is_one_error(script: Path) -> None:
    with pytest.raises(UsageError, match=r"the forward of .*Branching cannot be traced"):
        both(script, 2, function="reads_values")


def test_version_1_and_unknown_models_are_refused(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="covers FSDP2 only"):
        both(llama, 2, "fsdp_version=1")
    other = tmp_path / "config.json"
    other.write_text('{"model_type": "nosuchmodel"}')
    with pytest.raises(UsageError, match="cannot build"):
        build_from_config(other)
