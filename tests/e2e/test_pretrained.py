"""Scripts that load pretrained models under a launch: transformers' own loading, and files named in the YAML."""

import json

import pytest
import torch

from tests.needs import has, needs

pytest.importorskip("transformers", reason="transformers is a development dependency")

COMMON = """
import json, os, sys
import torch
import torch.distributed as dist
import fsdplaunch
import transformers
from transformers import AutoModel, AutoModelForCausalLM

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
ids = torch.arange(16).reshape(2, 8)
KINDS = {"tied": AutoModelForCausalLM, "bert": AutoModel}

def out(model):
    with torch.no_grad():
        return model.eval()(input_ids=ids)[0]
"""

EVERY_WAY = (
    COMMON
    + """
found = {}
for kind, auto in KINDS.items():
    fsdplaunch.disable_fsdp_ram_efficient_loading()
    expected = out(auto.from_pretrained(kind))
    fsdplaunch.enable_fsdp_ram_efficient_loading()
    for way in ("as it comes", "on rank 0 only", "by shards"):
        if way == "by shards" and transformers.__version__ < "5":
            continue  # nothing makes the buffers that no file has
        weights = None
        if way == "by shards":
            weights = kind
            with torch.device("meta"):
                model = auto.from_config(transformers.AutoConfig.from_pretrained(kind))
        else:
            model = auto.from_pretrained(kind)
        if way == "on rank 0 only" and os.environ["RANK"] != "0":
            model = model.to("meta")
            model.tie_weights()
        plugin = fsdplaunch.FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=True)
        model = fsdplaunch.prepare(model, plugin=plugin, weights=weights)
        found[f"{kind} {way}"] = (out(model) - expected).abs().max().item()
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
    )

    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True)).save_pretrained("tied")
    BertModel(BertConfig(**sizes, **heads)).save_pretrained("bert")


@pytest.mark.parametrize("version", [1, 2])
def test_pretrained_models_are_whole_however_they_are_loaded(fsdplaunch, tmp_path, monkeypatch, version):
    """transformers 5.23 gives every rank values under its switch, earlier ones only each machine's first rank."""
    monkeypatch.chdir(tmp_path)
    write_models()
    (tmp_path / "train.py").write_text(EVERY_WAY)
    done = fsdplaunch("launch", "--use-cpu", "--num-processes", 2, "--fsdp-version", version, "train.py")
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        found = json.loads((tmp_path / f"found-{rank}.json").read_text())
        assert len(found) == (6 if has("transformers", "5.0") else 4)
        assert {way: difference for way, difference in found.items() if not difference < 1e-6} == {}


BY_CONFIGURATION = (
    COMMON
    + """
with torch.device("meta"):
    model = AutoModel.from_config(transformers.AutoConfig.from_pretrained("bert"))
model = fsdplaunch.prepare(model)
json.dump(out(model).tolist(), open(f"found-{os.environ['RANK']}.json", "w"))
"""
)


@needs("transformers", "5.0", "makes no buffers of a model that was built without memory")
def test_weights_named_in_the_file_fill_a_model_without_any(fsdplaunch, tmp_path, monkeypatch):
    from transformers import BertModel

    monkeypatch.chdir(tmp_path)
    write_models()
    (tmp_path / "train.py").write_text(BY_CONFIGURATION)
    (tmp_path / "fsdp.yaml").write_text("num_processes: 2\nuse_cpu: true\ncheckpoint:\n  weights: bert\n")
    done = fsdplaunch("launch", "train.py")
    assert done.returncode == 0, done.stderr
    assert "BertModel: 39 tensors from bert" in done.stderr
    with torch.no_grad():
        expected = BertModel.from_pretrained("bert").eval()(torch.arange(16).reshape(2, 8))[0]
    for rank in range(2):
        found = torch.tensor(json.loads((tmp_path / f"found-{rank}.json").read_text()))
        assert torch.allclose(found, expected, atol=1e-6)

    (tmp_path / "fsdp.yaml").write_text("num_processes: 2\nuse_cpu: true\ncheckpoint:\n  weights: gone\n")
    refused = fsdplaunch("launch", "train.py")
    assert refused.returncode == 3
    assert "checkpoint.weights: no model folder gone" in refused.stderr
