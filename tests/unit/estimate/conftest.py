"""Model folders made for the purpose, and a small model's configuration."""

import json
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest

LLAMA: Mapping[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_hidden_layers": 12,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


@pytest.fixture
def llama() -> dict[str, Any]:
    return dict(LLAMA)


def write_shard(path: Path, tensors: Mapping[str, tuple[int, ...]], **more: Any) -> None:
    """Write a safetensors file whose data is a hole: headers only take space."""
    header, end = {f"__{name}__": value for name, value in more.items()}, 0
    for name, shape in tensors.items():
        size = 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


@pytest.fixture
def model_folder(tmp_path: Path, llama: dict[str, Any]) -> Callable[..., Path]:
    """Return a function that makes a model folder of some shards, with index and config.json."""
    from fsdplaunch.estimate.model import describe

    def make(shards: int = 3, **changes: Any) -> Path:
        config = llama | changes
        folder = tmp_path / "model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        tensors = {name: tensor.shape for name, tensor in describe(config, source="test").sizes.names.items()}
        names = list(tensors)
        where = {}
        for number in range(shards):
            file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
            part = names[number::shards]
            write_shard(folder / file, {name: tensors[name] for name in part})
            where |= dict.fromkeys(part, file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
        return folder

    return make
