import pytest

from fsdplaunch.errors import UsageError
from fsdplaunch.probe.model_files import (
    RepeatedBlocks,
    file_header,
    find_blocks,
)


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
    assert find_blocks(counts) == (RepeatedBlocks(prefix="layers", count=3, parameters=12),)
