"""What accelerate and transformers write of a sharded model is full tensors, and loads in a plain process."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import BertConfig, BertForSequenceClassification, BertModel, LlamaConfig, LlamaForCausalLM

from tests.needs import needs

SCRIPTS = Path(__file__).parent / "saving"
FOUND = {"fsdp_config__fsdp_transformer_layer_cls_to_wrap": None}
SMALL = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=8)
WRAP = {"fsdp_config__fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}


def keys(version: int, layer: str, kind: str = "SHARDED_STATE_DICT") -> dict[str, object]:
    return {
        "fsdp_config__fsdp_version": version,
        "fsdp_config__fsdp_transformer_layer_cls_to_wrap": [layer],
        "fsdp_config__fsdp_state_dict_type": kind,
        **WRAP,
    }


def assert_equal(found: dict[str, torch.Tensor], trained: dict[str, torch.Tensor]) -> None:
    """Assert that every trained parameter is there with its shape and its value."""
    assert trained.keys() <= found.keys()
    for name, value in trained.items():
        assert found[name].shape == value.shape, name
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize(
    ("version", "more"),
    [(1, {"fsdp_config__fsdp_use_orig_params": False}), (2, FOUND)],
    ids=["FSDP1 flat", "FSDP2, blocks that accelerate finds"],
)
def test_every_saving_call_of_an_accelerate_script_writes_full_tensors(forks, tmp_path, version, more):
    out = tmp_path / "out"
    out.mkdir()
    options = keys(version, "BertLayer") | more
    run = forks.passes(SCRIPTS / "accelerate_saves.py", tmp_path / "run", str(out), ranks=2, **options)
    finds = more is FOUND and bool(
        BertForSequenceClassification(SMALL)._no_split_modules
    )  # from transformers 5 on
    assert ("BertEmbeddings is not a unit, because the input embeddings" in run.err[0]) is finds
    trained = torch.load(out / "trained.pt")
    assert trained["classifier.weight"].shape == (2, 32)
    for folder in ("library", "pieces", "given", "alone", "alone given", "checkpoint/by hook"):
        loaded = BertForSequenceClassification.from_pretrained(out / folder)
        assert_equal(loaded.state_dict(), trained)
        assert loaded.config.architectures == ["BertForSequenceClassification"]
    part = {name.removeprefix("bert."): value for name, value in trained.items() if name.startswith("bert.")}
    for folder in ("part", "alone part"):
        assert_equal(BertModel.from_pretrained(out / folder).state_dict(), part)
    assert_equal(load_file(out / "alone model" / "model.safetensors"), trained)
    index = json.loads((out / "model" / "model.safetensors.index.json").read_text())
    files = {name: load_file(out / "model" / name) for name in set(index["weight_map"].values())}
    assert len(files) > 1
    assert_equal({name: files[file][name] for name, file in index["weight_map"].items()}, trained)
    assert_equal(torch.load(out / "unwrapped.pt"), trained)
    assert_equal(torch.load(out / "state.pt"), trained)
    if version == 1:
        return
    assert_equal(load_file(out / "alone.st"), trained)
    whole = torch.load(out / "alone.pt")
    assert_equal(whole["model"], trained)
    averages = [values["exp_avg"] for values in whole["optimizer"]["state"].values()]
    assert [type(average) for average in averages] == [torch.Tensor] * len(trained)
    assert sorted(average.shape for average in averages) == sorted(value.shape for value in trained.values())


def test_shards_given_as_a_state_are_refused_with_the_line_before_anything_is_written(forks, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    run = forks.run(
        SCRIPTS / "accelerate_saves.py", tmp_path / "run", str(out), "wrong", ranks=2, **keys(1, "BertLayer")
    )
    assert set(run.codes) == {1}
    line = next(
        n for n, text in enumerate((SCRIPTS / "accelerate_saves.py").open(), 1) if "state_dict=wrong" in text
    )
    assert f"save_pretrained at accelerate_saves.py:{line}: " in run.err[0]
    assert "has shape [3], the model's is [" in run.err[0]
    assert not (out / "wrong").exists()


@pytest.mark.parametrize(
    ("configured", "special"),
    [
        ({}, ["alone"]),
        (keys(1, "LlamaDecoderLayer") | {"fsdp_config__fsdp_activation_checkpointing": True}, ["best"]),
        (keys(2, "LlamaDecoderLayer"), ["bf16", "best", "older"]),
        (keys(1, "LlamaDecoderLayer", "FULL_STATE_DICT"), ["model only", "own saves"]),
    ],
    ids=[
        "built-in, and by rank 0",
        "FSDP1, best step",
        "FSDP2, bf16, best step, transformers 4",
        "FSDP1 full, model only, own saves",
    ],
)
def test_trainer_leaves_a_model_that_loads_whatever_its_checkpoints_are(forks, tmp_path, configured, special):
    out = tmp_path / "out"
    run = forks.passes(SCRIPTS / "trainer_saves.py", tmp_path / "run", str(out), *special, ranks=2, **configured)
    version = configured.get("fsdp_config__fsdp_version", 2)
    assert re.search(rf"sharded LlamaForCausalLM: .*FSDP{version} .*over 2 ranks", run.err[0])
    first, second, trained = (torch.load(out / f"{name}.pt") for name in ("step-1", "step-2", "trained"))
    assert not torch.equal(first["lm_head.weight"], second["lm_head.weight"])
    assert_equal(trained, first if "best" in special else second)
    assert {value.dtype for value in trained.values()} == {torch.bfloat16 if "bf16" in special else torch.float32}
    folders = {out: trained, out / "checkpoint-2": second, out / "typed": trained}
    if "alone" in special:
        folders[out / "alone"] = trained
    for folder, state in folders.items():
        loaded = LlamaForCausalLM.from_pretrained(folder, dtype="auto")
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        assert_equal(loaded.state_dict(), state)
        if "own saves" in special:
            assert torch.equal(torch.load(folder / "part.pt")["weight"], state["lm_head.weight"])
    sharded = configured.get("fsdp_config__fsdp_state_dict_type") != "FULL_STATE_DICT"
    assert (out / "checkpoint-1" / "model.safetensors").exists() is not sharded


@needs("peft", "0.17", "to make adapters with")
def test_trainer_leaves_adapters_that_load_from_inside_of_units(forks, tmp_path):
    from peft import PeftModel

    out = tmp_path / "out"
    inside = keys(1, "LlamaDecoderLayer") | {"fsdp_config__fsdp_activation_checkpointing": True}
    forks.passes(SCRIPTS / "trainer_saves.py", tmp_path / "run", str(out), "peft", ranks=2, **inside)
    trained = torch.load(out / "trained.pt")
    config = LlamaConfig(vocab_size=64, tie_word_embeddings=True, num_hidden_layers=2, num_attention_heads=2,
                         hidden_size=32, intermediate_size=64)  # fmt: skip
    found = PeftModel.from_pretrained(LlamaForCausalLM(config), out).state_dict()
    adapters = {name: value for name, value in trained.items() if "lora_" in name}
    assert len(adapters) == 4
    assert_equal(found, adapters)


def test_what_rank_0_alone_asks_of_fsdp1_is_an_error_at_its_line(forks, tmp_path):
    run = forks.passes(SCRIPTS / "fsdp1_saves.py", tmp_path / "run", ranks=2)
    names = ("model", "module", "optimizer", "named", "dcp", "summoned", "evaluated")
    lines = [line for line in run.out[0].splitlines() if "hint: " not in line]
    assert lines == [*(f"{name} True True True" for name in names), "4 4 11"]


def test_rank_0_saves_alone_what_a_script_has_sharded_by_hand_or_is_told_soon(forks, tmp_path):
    run = forks.passes(SCRIPTS / "hand_saves.py", tmp_path / "run", ranks=2)
    lines = [line for line in run.out[0].splitlines() if not line.startswith("hint: ")]
    alone = "was called on rank 0 only: rank 1 went on, waiting for rank 0 at hand_saves.py:"
    for line, says in zip(
        lines,
        (
            rf"FSDP1, early at once: state_dict\(\) of a model that FSDP1 has sharded {alone}",
            rf"early at once: torch.save at hand_saves.py:\d+ {alone}",
            rf"shards at once: torch.distributed.checkpoint.load {alone}",
            "evaluated alone: True",
            "not sharded: 8",
            "compared 8 8",
        ),
        strict=True,
    ):
        assert re.match(says, line), line
    assert {path.name for path in run.folder.iterdir()} == {
        *("both.pt", "file.safetensors", "gathered.pt", "dcp.pt", "dcp-optimizer.pt", "dcp-both.pt"),
        *("own-0.pt", "own-1.pt", "sharded", "hub", "hub-of-all"),
        *("one-of-all.pt", "one-of-all.safetensors"),
    }
    gathered = torch.load(run.folder / "gathered.pt")
    assert_equal(torch.load(run.folder / "one-of-all.pt"), gathered)  # which all ranks save to
    assert_equal(load_file(run.folder / "one-of-all.safetensors"), gathered)
    assert "hand_saves.py:" in run.err[0] and "torch.save writes each rank's own shards here" in run.err[0]
