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
from fsdplaunch.errors import UsageError
from fsdplaunch.estimate.build import build, built_sizes
from fsdplaunch.estimate.memory import MemoryNeed, memory_need, training_setup
from fsdplaunch.estimate.model import FAMILIES, describe, read_json_file
from tests.distributed.pool import RankPool
from tests.needs import has
from tests.yaml_config import config_of

SMALL = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 1000, "intermediate_size": 96,
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

    known = CONFIG_MAPPING[kind]().to_dict()
    return CONFIG_MAPPING[kind](**{name: value for name, value in SMALL.items() if name in known})


@pytest.mark.parametrize("kind", FAMILIES)
def test_parameters_of_every_family_are_those_transformers_builds(kind: str) -> None:
    import transformers

    tried = 0
    for name in ("AutoModelForCausalLM", "AutoModel"):
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


def needed(path: Path, *overrides: str) -> MemoryNeed:
    """What two ranks on CPU need, as it is calculated."""
    run: dict[str, Any] = {"world": 2, "per_node": 2, "batch_size": BATCH, "length": LENGTH, "on_gpu": False}
    setup = training_setup(config_of("use_cpu=true", *overrides), optimizer="adamw", **run)
    return memory_need(describe(read_json_file(path), source="llama"), setup)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
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


def test_an_estimate_is_close_to_what_a_real_step_allocates(two_ranks: RankPool, llama: Path) -> None:
    two_ranks.begin(measured_peak, str(llama.parent), {"mixed_precision_policy": "bf16"})
    need = needed(llama, "mixed_precision=bf16")
    assert need.total == pytest.approx(two_ranks.wait()[0], rel=0.15)


SCRIPT = """
import torch
from torch import nn

def block():
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))

print("noise on stdout")

def build():
    return nn.ModuleList(block() for _ in range(3))

def raises():
    raise RuntimeError("no such disk")

def wrong():
    return 3
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_model_of_a_script_is_built_without_memory_and_counted(script: Path) -> None:
    sizes = built_sizes(script, "build")
    assert (sizes.depth, sizes.parameters) == (3, 3 * (2 * 32 * 64 + 64 + 32))
    with pytest.raises(UsageError, match="the function returned int"):
        built_sizes(script, "wrong")


@pytest.mark.parametrize(
    ("function", "source", "text"),
    [
        ("raises", SCRIPT, r"train\.py:raises raised RuntimeError: no such disk \(line 14\)"),
        ("absent", SCRIPT, r"train\.py has no function absent"),
        ("build", "import sys\nsys.exit('usage: --data')", r"importing .*raised SystemExit: usage: .* \(line 2\)"),
    ],
)
def test_function_that_builds_nothing_is_one_error(script: Path, function: str, source: str, text: str) -> None:
    script.write_text(source)
    with pytest.raises(UsageError, match=text):
        build(script, function)
