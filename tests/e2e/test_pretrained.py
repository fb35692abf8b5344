"""Scripts that load pretrained models under a launch: transformers' own loading, and files named in the YAML."""

import json

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is a development dependency")

COMMON = """
import json, os, sys
import torch
import torch.distributed as dist
import fsdplaunch
import transformers
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageClassification

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
ids = torch.arange(16).reshape(2, 8)
image = torch.linspace(-1, 1, 3 * 32 * 32).reshape(1, 3, 32, 32)
KINDS = {
    "llama": (AutoModelForCausalLM, {"input_ids": ids}),
    "tied": (AutoModelForCausalLM, {"input_ids": ids}),
    "bert": (AutoModel, {"input_ids": ids}),
    "resnet": (AutoModelForImageClassification, {"pixel_values": image}),
}

def out(model, kind):
    with torch.no_grad():
        return model.eval()(**KINDS[kind][1])[0]
"""

BY_TRANSFORMERS = (
    COMMON
    + """
found = {}
for kind, (auto, _) in KINDS.items():
    fsdplaunch.disable_fsdp_ram_efficient_loading()
    expected = out(auto.from_pretrained(kind), kind)
    fsdplaunch.enable_fsdp_ram_efficient_loading()
    model = auto.from_pretrained(kind)
    empty = sum(param.is_meta for param in model.parameters())
    every = sum(1 for _ in model.parameters())
    wrap = {"auto_wrap_policy": "NO_WRAP"} if kind == "resnet" else {}
    plugin = fsdplaunch.FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=True, **wrap)
    model = fsdplaunch.prepare(model, plugin=plugin)
    found[kind] = ((out(model, kind) - expected).abs().max().item(), empty, every)
json.dump(found, open(f"found-{os.environ['RANK']}.json", "w"))
"""
)


def write_models() -> None:
    """One small model of each kind, with values in its buffers that no initialisation gives."""
    from transformers import (
        BertConfig,
        BertModel,
        LlamaConfig,
        LlamaForCausalLM,
        ResNetConfig,
        ResNetForImageClassification,
    )

    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2}
    for name, tied in (("llama", False), ("tied", True)):
        LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=tied)).save_pretrained(name)
    BertModel(BertConfig(**sizes, **heads)).save_pretrained("bert")
    stages = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    resnet = ResNetForImageClassification(ResNetConfig(**stages, num_labels=3))
    for name, buffer in resnet.named_buffers():
        if "running" in name:
            buffer.uniform_(0.5, 1.5)
    resnet.save_pretrained("resnet")


@pytest.mark.parametrize("version", [1, 2])
def test_models_that_transformers_loads_on_rank_0_only_are_whole(fsdplaunch, tmp_path, monkeypatch, version):
    monkeypatch.chdir(tmp_path)
    write_models()
    (tmp_path / "train.py").write_text(BY_TRANSFORMERS)
    done = fsdplaunch("launch", "--use-cpu", "--num-processes", 2, "--fsdp-version", version, "train.py")
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        for kind, (difference, empty, every) in json.loads((tmp_path / f"found-{rank}.json").read_text()).items():
            assert difference < 1e-6, kind
            assert empty == (every if rank else 0), kind


BY_FILES = (
    COMMON
    + """
kind = sys.argv[1]
auto, _ = KINDS[kind]
fsdplaunch.disable_fsdp_ram_efficient_loading()
expected = out(auto.from_pretrained(kind), kind)
with torch.device("meta"):
    model = auto.from_config(transformers.AutoConfig.from_pretrained(kind))
model = fsdplaunch.prepare(model)
json.dump((out(model, kind) - expected).abs().max().item(), open(f"found-{os.environ['RANK']}.json", "w"))
"""
)


@pytest.mark.parametrize(("version", "kind"), [(1, "tied"), (2, "bert"), (2, "resnet")])
def test_weights_named_in_the_configuration_fill_a_model_without_any(
    fsdplaunch, tmp_path, monkeypatch, version, kind
):
    monkeypatch.chdir(tmp_path)
    write_models()
    (tmp_path / "train.py").write_text(BY_FILES)
    wrap = ["--fsdp-auto-wrap-policy", "NO_WRAP"] if kind == "resnet" else []
    options = ["--use-cpu", "--num-processes", 2, "--fsdp-version", version, "--checkpoint.weights", kind, *wrap]
    done = fsdplaunch("launch", *options, "train.py", kind)
    assert done.returncode == 0, done.stderr
    assert f"tensors from {kind}" in done.stderr
    for rank in range(2):
        assert json.loads((tmp_path / f"found-{rank}.json").read_text()) < 1e-6
