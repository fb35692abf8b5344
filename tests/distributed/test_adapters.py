"""Adapters of PEFT alone, by accelerate's functions and these, each reading what the other wrote."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdplaunch
from fsdplaunch.errors import ShardingError
from tests.distributed import split_models as models
from tests.distributed.pool import RankPool
from tests.distributed.test_accelerate_functions import FORMS, accelerator
from tests.distributed.test_tensor_parallel import variables
from tests.distributed.tiny import build, plugin

pytest.importorskip("accelerate", reason="accelerate is a development dependency")
# Not imported here, for that takes seconds in every process of a run in parallel; the ranks alone use it.
pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="peft is a development dependency")


def with_lora(seed: int, version: int, form: str) -> tuple[Any, Any]:
    """A frozen model with trained adapters of the seed's values, sharded, and an accelerator with its plugin."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["qkv"], init_lora_weights=False)
    base = build(0)
    torch.manual_seed(seed)
    model = get_peft_model(base, config)
    fields: dict[str, Any] = {"fsdp_version": version, "state_dict_type": form}
    if version == 1:
        fields["use_orig_params"] = True
    theirs = accelerator(**fields)
    if form == "FULL_STATE_DICT":
        theirs.num_processes = 2
    return fsdplaunch.prepare(model, plugin=plugin(**fields)), theirs


def weights(model: Any) -> dict[str, torch.Tensor]:
    with fsdplaunch.summon_full_params(model):
        return {n: p.detach().clone() for n, p in fsdplaunch.named_parameters(model)}


def equal(model: Any, other: dict[str, torch.Tensor]) -> bool:
    own = weights(model)
    return sorted(own) == sorted(other) and all(torch.equal(own[n], other[n]) for n in other)


def with_theirs(version: int, form: str) -> bool:
    """Whether accelerate can save it.

    peft 0.21 finds no layer inside a unit of FSDP1; accelerate 1.12 writes rank 0's shards only into one file.
    """
    from accelerate.utils import fsdp_utils

    gathers = "full_state_dict" in fsdp_utils._get_model_state_dict.__code__.co_names
    return version == 2 and (gathers or form != "FULL_STATE_DICT")


def round_trips(folder: str, version: int, form: str) -> dict[str, Any]:
    from accelerate.utils import fsdp_utils as theirs

    model, acc = with_lora(1, version, form)
    wanted = weights(model)
    own = acc.state.fsdp_plugin
    if with_theirs(version, form):
        theirs.save_fsdp_model(own, acc, model, f"{folder}/theirs", adapter_only=True)
    fsdplaunch.save_fsdp_model(own, acc, model, f"{folder}/ours", adapter_only=True)
    dist.barrier()
    same = {}
    for source in sorted(path.name for path in Path(folder).iterdir()):
        other, acc = with_lora(2, version, form)
        before = equal(other, wanted)
        fsdplaunch.load_fsdp_model(None, acc, other, f"{folder}/{source}", adapter_only=True)
        same[source] = (before, equal(other, wanted))
    if with_theirs(version, form):
        other, acc = with_lora(2, version, form)
        theirs.load_fsdp_model(acc.state.fsdp_plugin, acc, other, f"{folder}/ours", adapter_only=True)
        same["ours, read by accelerate"] = (False, equal(other, wanted))
    size = sum(path.stat().st_size for path in Path(folder, "ours").rglob("*") if path.is_file())
    return {"same": same, "size": size}


@pytest.mark.parametrize(("version", "form"), FORMS)
def test_adapters_alone_go_out_and_in(two_ranks: RankPool, tmp_path: Path, version: int, form: str) -> None:
    found = two_ranks.run(round_trips, str(tmp_path), version, form)[0]
    assert set(found["same"].values()) == {(False, True)}
    assert len(found["same"]) == (3 if with_theirs(version, form) else 1)
    assert found["size"] < 30_000  # the whole model is 37,800 bytes of weights


def split_adapters() -> str:
    """Why a model whose split layers hold adapters is refused."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(models.built("llama"), LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ShardingError) as refused:
        fsdplaunch.prepare(model)
    return refused.value.message


def test_adapters_of_split_layers_are_refused(two_ranks: RankPool) -> None:
    said = two_ranks.run(split_adapters, env=variables(2))[0]
    assert said.endswith("model.layers.0.self_attn.q_proj, which holds adapters")
