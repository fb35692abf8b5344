import json
from pathlib import Path

import pytest

from fsdplaunch.errors import UsageError
from fsdplaunch.probe.model_files import (
    RepeatedBlocks,
    describe_model,
    file_header,
    find_blocks,
    read_model,
    short_count,
    sized_model,
)

BLOCK = 8 * 8 + 16 * 8
OUTSIDE = 50 * 8 + 8


def write(path: Path, tensors, metadata=None):
    """A safetensors file of zeros, made by hand."""
    header, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = {"F32": 4, "BF16": 2, "F8_E4M3": 1}[dtype]
        for length in shape:
            size *= length
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    if metadata:
        header["__metadata__"] = metadata
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(at))


def test_read_model_single_file_counts_parameters_and_blocks(tmp_path, tiny_llama):
    write(tmp_path / "model.safetensors", tiny_llama, {"format": "pt"})
    facts = read_model(tmp_path)
    assert facts.parameters == OUTSIDE + 3 * BLOCK
    assert facts.blocks == (
        RepeatedBlocks(prefix="model.layers", count=3, parameters_each=BLOCK, parameters=3 * BLOCK),
    )
    assert (facts.unit, facts.outside, facts.dtype) == (BLOCK, OUTSIDE, "bf16")
    assert facts.size_bytes == (tmp_path / "model.safetensors").stat().st_size
    assert (
        describe_model(facts)
        == f"{tmp_path}   {short_count(984)} parameters, bf16, 3 repeated blocks (model.layers.*)"
    )


def test_read_model_shards_of_an_index_are_read_and_others_are_not(tmp_path, tiny_llama):
    names = sorted(tiny_llama)
    write(tmp_path / "a.safetensors", {name: tiny_llama[name] for name in names[:4]})
    write(tmp_path / "b.safetensors", {name: tiny_llama[name] for name in names[4:]})
    write(tmp_path / "consolidated.safetensors", {"other.weight": ("F32", (1000, 1000))})
    weight_map = {name: ("a" if name in names[:4] else "b") + ".safetensors" for name in names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert read_model(tmp_path).parameters == OUTSIDE + 3 * BLOCK


def test_read_model_index_naming_an_absent_file_is_refused(tmp_path, tiny_llama):
    write(tmp_path / "a.safetensors", tiny_llama)
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors", "z": "c.safetensors"}})
    )
    with pytest.raises(UsageError, match=r"names b\.safetensors, which is not there, nor are 1 more"):
        read_model(tmp_path)


def test_read_model_formats_are_counted_most_first(tmp_path):
    write(tmp_path / "m.safetensors", {"a": ("F32", (3,)), "b": ("BF16", (10, 10)), "c": ("F8_E4M3", (2,))})
    facts = read_model(tmp_path)
    assert list(facts.dtypes.items()) == [("bf16", 100), ("fp32", 3), ("fp8", 2)]
    assert facts.unit == facts.parameters == 105


def test_read_model_pickled_weights_tell_their_size_only(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x" * 1500)
    facts = read_model(tmp_path)
    assert (facts.size_bytes, facts.parameters, facts.blocks) == (1500, None, ())
    assert "pickled weights, not looked into" in describe_model(facts)


def test_read_model_without_weights_or_a_folder_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="holds no"):
        read_model(tmp_path)
    with pytest.raises(UsageError, match="does not exist"):
        read_model(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x05\0\0",
        (10**9).to_bytes(8, "little") + b"{}",
        (2**63).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"\xff\xff{}",
        (20).to_bytes(8, "little") + b'{"a":{"dtype":"F32"}',
        (22).to_bytes(8, "little") + b'{"a":{"dtype":"F32" }}',
        (33).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[-1]}}'[:33],
        (9000).to_bytes(8, "little") + b"[" * 9000,
    ],
    ids=["empty", "short", "longer-than-file", "huge", "list", "not-text", "cut", "no-shape", "cut-shape", "deep"],
)
def test_read_header_damaged_file_is_named(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"model\.safetensors is not a complete safetensors file: "):
        file_header(path)


def names(*entries):
    return dict.fromkeys(entries, 1)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        (
            {f"encoder.layer.{i}.w": 10 for i in range(4)} | {f"decoder.layer.{i}.w": 30 for i in range(2)},
            [("decoder.layer", 2), ("encoder.layer", 4)],
        ),
        (names("layers.0.dense.w", "layers.1.moe.w", "layers.2.moe.w"), [("layers", 3)]),
        (
            names(
                *(f"stages.{s}.extra{s}" for s in range(2)),
                *(f"stages.{s}.blocks.{b}.w" for s in range(2) for b in range(3)),
            ),
            [("stages.0.blocks", 3), ("stages.1.blocks", 3)],
        ),
        (names("net.0.weight", "net.2.weight", "net.4.weight"), []),
        (names("0.weight", "1.weight"), [("", 2)]),
        (names("weight", "a.weight", "0"), []),
    ],
    ids=["two towers", "an unlike first", "unlike stages", "gaps", "a list without a name", "plain names"],
)
def test_find_blocks(counts, expected):
    assert [(group.prefix, group.count) for group in find_blocks(counts)] == expected


def test_find_blocks_experts_inside_blocks_belong_to_their_block():
    counts = names(*(f"layers.{i}.mlp.experts.{j}.w" for i in range(3) for j in range(4)))
    assert find_blocks(counts) == (RepeatedBlocks(prefix="layers", count=3, parameters_each=4, parameters=12),)


@pytest.mark.parametrize(
    ("number", "text"), [(8_030_261_248, "8.03 B"), (124_439_808, "124 M"), (1500, "1.5 K"), (984, "984")]
)
def test_short_count_as_people_write_it(number, text):
    assert short_count(number) == text


def test_sized_model_blocks_are_near_those_of_a_known_model():
    """Llama-3.1-8B has blocks of 218 M parameters; none is larger than its model."""
    assert sized_model(8_030_000_000).unit == pytest.approx(218e6, rel=0.1)
    assert sized_model(1000).unit == 1000
