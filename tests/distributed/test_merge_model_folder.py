"""Merged folders that transformers loads: tied weights written once, configuration and tokenizer copied."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, T5Config, T5ForConditionalGeneration

from fsdplaunch.checkpoint.merge.merge import MergeOptions, merge, merge_fsdp_weights
from fsdplaunch.errors import UsageError

SMALL = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
LLAMA = LlamaConfig(**SMALL, num_attention_heads=2, tie_word_embeddings=True)
GPT2 = GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=32)
T5 = T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0)


COPIED = ["chat_template.jinja", "config.json", "merges.txt", "spiece.model", "tokenizer.json"]
COPIED += ["tokenizer_config.json", "vocab.json"]
"""Everything but weights and the state of training."""


def build(config) -> nn.Module:
    torch.manual_seed(0)
    return T5ForConditionalGeneration(config) if config is T5 else AutoModelForCausalLM.from_config(config)


def save(model: nn.Module, folder: Path) -> Path:
    """A checkpoint of the model, and a model folder whose weights are others."""
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "pytorch_model_fsdp_0", no_dist=True)
    base = folder / "base"
    base.mkdir()
    model.config.save_pretrained(base)
    tokenizer = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "spiece.model")
    others = ("model.safetensors", "pytorch_model.bin", "training_args.bin", "optimizer.pt", "notes.md")
    for name in (*tokenizer, "chat_template.jinja", *others):
        (base / name).write_text(f"content of {name}")
    return folder / "pytorch_model_fsdp_0"


@pytest.mark.parametrize(
    ("config", "left_out", "kept"),
    [
        (LLAMA, {"lm_head.weight"}, "model.embed_tokens.weight"),
        (GPT2, {"lm_head.weight"}, "transformer.wte.weight"),
        (T5, {"lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}, "shared.weight"),
    ],
    ids=["llama", "gpt2", "t5"],
)
def test_merge_with_copied_files_is_loaded_by_transformers_with_the_same_answers(config, left_out, kept, tmp_path):
    model = build(config)
    options = MergeOptions(copy_from=tmp_path / "base", verify=True)
    result = merge(save(model, tmp_path), tmp_path / "out", options=options)
    assert [path.name for path in result.copied] == COPIED
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted([*COPIED, "model.safetensors"])
    for name in COPIED:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "base" / name).read_bytes()
    assert {name for name, _ in result.tied} == left_out & set(model.state_dict())
    assert {name for _, name in result.tied} <= {kept}
    found = load_file(tmp_path / "out/model.safetensors")
    assert not left_out & set(found)
    loaded, told = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    tokens = torch.tensor([[1, 2, 3, 4]])
    more = {"decoder_input_ids": tokens} if config is T5 else {}
    model.eval()
    assert torch.equal(loaded.eval()(tokens, **more).logits, model(tokens, **more).logits)


def test_files_beside_the_weights_come_with_them_unless_the_output_has_its_own(tmp_path):
    model, out = build(LLAMA), tmp_path / "out"
    checkpoint = save(model, tmp_path)
    model.config.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "training_args.bin"):
        (tmp_path / name).write_text("the checkpoint's")
    out.mkdir()
    (out / "tokenizer.json").write_text("its own")
    assert [path.name for path in merge(checkpoint, out).copied] == ["config.json"]
    assert (out / "tokenizer.json").read_text() == "its own"
    assert AutoModelForCausalLM.from_pretrained(out).config.vocab_size == LLAMA.vocab_size


def test_tied_weight_is_noted_as_safetensors_does_and_kept_on_request(tmp_path):
    model = build(LLAMA)
    checkpoint = save(model, tmp_path)
    merge(checkpoint, tmp_path / "out")
    with safe_open(tmp_path / "out/model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "lm_head.weight": "model.embed_tokens.weight"}
    fresh = AutoModelForCausalLM.from_config(LLAMA)
    assert load_model(fresh, tmp_path / "out/model.safetensors") == (set(), [])
    assert torch.equal(fresh.lm_head.weight, model.lm_head.weight)
    result = merge(checkpoint, tmp_path / "both", options=MergeOptions(keep_tied=True))
    assert (result.tied, sorted(load_file(tmp_path / "both/model.safetensors"))) == (
        (),
        sorted(model.state_dict()),
    )
    merge_fsdp_weights(checkpoint, tmp_path / "function")
    assert (tmp_path / "function/model.safetensors").read_bytes() == (
        tmp_path / "both/model.safetensors"
    ).read_bytes()


def manifest(folder: Path, *tied: list[str]) -> None:
    told = {"complete": True, "files": {}, "models": [{"class": "Net", "tied": list(tied)}]}
    (folder / "fsdplaunch.json").write_text(json.dumps(told))


def test_manifest_decides_which_equal_weights_are_one(tmp_path):
    same = torch.randn(6, 4)
    state = {name: same.clone() for name in ("a.weight", "b.weight", "c.weight", "lm_head.weight")}
    state |= {"embed_tokens.weight": same.clone(), "d.weight": torch.randn(6, 4), "e.weight": same.bfloat16()}
    dcp.save({"model": state}, checkpoint_id=tmp_path / "pytorch_model_fsdp_0", no_dist=True)
    manifest(tmp_path, ["b.weight", "a.weight", "d.weight", "e.weight", "gone.weight"])
    result = merge(tmp_path / "pytorch_model_fsdp_0", tmp_path / "out")
    assert result.tied == (("a.weight", "b.weight"),)
    assert sorted(load_file(tmp_path / "out/model.safetensors")) == sorted(set(state) - {"a.weight"})
    options = MergeOptions(exclude=("b",), rename=(("a", "z"),))
    assert merge(tmp_path / "pytorch_model_fsdp_0", tmp_path / "one", options=options).tied == ()
    options = MergeOptions(rename=(("a", "z"), ("b", "y")))
    assert merge(tmp_path / "pytorch_model_fsdp_0", tmp_path / "two", options=options).tied == (
        ("z.weight", "y.weight"),
    )


def test_weights_that_differ_in_the_last_value_or_are_said_to_be_untied_stay(tmp_path):
    model = build(LLAMA)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state["lm_head.weight"][-1, -1] += 1
    dcp.save({"model": state}, checkpoint_id=tmp_path / "differ", no_dist=True)
    assert merge(tmp_path / "differ", tmp_path / "out").tied == ()
    checkpoint = save(model, tmp_path)
    config = json.loads((tmp_path / "base/config.json").read_text()) | {"tie_word_embeddings": False}
    (tmp_path / "base/config.json").write_text(json.dumps(config))
    result = merge(checkpoint, tmp_path / "untied", options=MergeOptions(copy_from=tmp_path / "base"))
    assert result.tied == ()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "untied")
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("nowhere", "nowhere is not a folder"),
        ("empty", "empty holds no config.json"),
        ("out", "is also the model folder"),
    ],
)
def test_model_folder_that_cannot_be_used_is_refused(where, message, tmp_path):
    dcp.save({"model": {"w": torch.ones(2)}}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=message):
        merge(tmp_path / "ckpt", tmp_path / "out", options=MergeOptions(copy_from=tmp_path / where))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "empty"]
