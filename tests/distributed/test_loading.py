"""Pretrained weights from files into shards: every kind of shard, names, formats, buffers, and what is refused."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fsdplaunch
from tests.distributed.pool import RankPool
from tests.distributed.test_checkpoints import largest_difference
from tests.distributed.test_saving import Peak
from tests.distributed.tiny import TinyLM, adamw, build, plugin, train_alone, train_sharded

STEPS = 3


def on_meta(**options: Any) -> TinyLM:
    """No weights; the one buffer that no file holds is there."""
    with torch.device("meta"):
        model = TinyLM(**options)
    model.scale = torch.tensor(1.0)
    return model


def apart(model: nn.Module, other: nn.Module) -> float:
    """How far what two models compute is apart."""
    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        return float((model(ids) - other(ids)).abs().max())


def write(folder: Path, *, tied: bool = False, dtype: torch.dtype = torch.float32) -> None:
    state = build(tied=tied).state_dict()
    if tied:
        del state["head.weight"]
    save_file({name: value.to(dtype).contiguous() for name, value in state.items()}, folder / "model.safetensors")


# Every kind of shard


def trained(folder: str, fields: dict[str, Any], options: dict[str, Any]) -> float:
    alone = train_alone(build(**options), STEPS)
    model = on_meta(**options)
    optimizer = adamw(model.parameters())
    model, optimizer = fsdplaunch.prepare(model, optimizer, plugin=plugin(**fields), weights=folder)
    return largest_difference(alone, train_sharded(model, optimizer, STEPS))


KINDS = {
    "FSDP2": {"fsdp_version": 2},
    "copies": {"fsdp_version": 2, "dp_replicate_size": 2},
    "checkpointed": {"fsdp_version": 2, "activation_checkpointing": True},
    "ignored": {"fsdp_version": 2, "ignored_modules": r"layers\.1"},
    "FSDP1": {"fsdp_version": 1},
    "flat": {"fsdp_version": 1, "use_orig_params": False},
    "FSDP1 ignored": {"fsdp_version": 1, "ignored_modules": r"layers\.1"},
    "FSDP1 whole": {"fsdp_version": 1, "sharding_strategy": "NO_SHARD"},
    "FSDP1 copies": {"fsdp_version": 1, "sharding_strategy": "HYBRID_SHARD", "dp_replicate_size": 2},
}


@pytest.mark.parametrize("kind", KINDS)
def test_model_without_memory_trains_as_the_one_in_the_files(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    write(tmp_path, tied=True)
    pool: RankPool = request.getfixturevalue("four_ranks" if "copies" in kind else "two_ranks")
    for difference in pool.run(trained, str(tmp_path), KINDS[kind], {"tied": True}):
        assert difference < 1e-5


# Values, formats


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    with fsdplaunch.summon_full_params(model):
        return {name: param.detach().clone() for name, param in fsdplaunch.named_parameters(model)}


def kept(folder: str, fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The full weights after loading, without training."""
    return weights(fsdplaunch.prepare(on_meta(), plugin=plugin(**fields), weights=folder))


@pytest.mark.parametrize(
    ("stored", "fields", "held"),
    [
        (torch.bfloat16, {}, torch.float32),
        (torch.float32, {"master_dtype": "bf16"}, torch.bfloat16),
        (torch.float16, {"mixed_precision_policy": "bf16"}, torch.float32),
    ],
)
def test_formats_are_converted_while_reading(
    two_ranks: RankPool, tmp_path: Path, stored: torch.dtype, fields: dict[str, Any], held: torch.dtype
) -> None:
    write(tmp_path, dtype=stored)
    for name, value in two_ranks.run(kept, str(tmp_path), {"fsdp_version": 2, **fields})[0].items():
        expected = build().state_dict()[name].to(stored).to(held)
        assert value.dtype == held
        assert torch.equal(value, expected), name


# Other meshes: strided parts, several axes


def over_mesh(folder: str) -> list[str]:
    """Names of the tensors whose shards differ from torch's own cut of the full tensor."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    layouts = [[Shard(0), Shard(1)], [Shard(1), Shard(0)], [Replicate(), Shard(1)], [Shard(0), Shard(0)]]
    full = build().state_dict()
    model = build(seed=9)
    for number, (name, param) in enumerate(list(model.named_parameters())):
        layout = [Shard(0), Replicate()] if param.dim() == 1 else layouts[number % len(layouts)]
        module, _, attribute = name.rpartition(".")
        shards = nn.Parameter(distribute_tensor(param.data, mesh, layout))
        setattr(model.get_submodule(module), attribute, shards)
    result = fsdplaunch.load_weights(model, folder)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    return [
        name
        for name, param in model.named_parameters()
        if not torch.equal(
            param.to_local(), distribute_tensor(full[name], param.device_mesh, param.placements).to_local()
        )
    ]


def test_shards_of_any_mesh_are_filled(four_ranks: RankPool, tmp_path: Path) -> None:
    write(tmp_path)
    assert four_ranks.run(over_mesh, str(tmp_path)) == [[]] * 4


def sharded_by_hand(folder: str) -> tuple[float, bool]:
    """Shards made by torch's own functions on the meta device, with dimensions that the ranks do not divide."""
    from torch.distributed.fsdp import fully_shard

    model = on_meta(tied=True)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    fsdplaunch.load_weights(model, folder)
    return apart(model, build(tied=True)), model.head.weight is model.embed.weight


def test_model_sharded_by_torch_alone_is_filled(four_ranks: RankPool, tmp_path: Path) -> None:
    write(tmp_path, tied=True)
    for difference, tied in four_ranks.run(sharded_by_hand, str(tmp_path)):
        assert difference < 1e-6
        assert tied


def reloaded(folder: str, version: int) -> float:
    """Weights read again into a model that has trained, which keeps its units gathered between steps."""
    fields = {"fsdp_version": version, "sharding_strategy": "SHARD_GRAD_OP"}
    model = build(seed=4)
    model, optimizer = fsdplaunch.prepare(model, adamw(model.parameters()), plugin=plugin(**fields))
    train_sharded(model, optimizer, 1)
    fsdplaunch.load_weights(model, folder)
    return apart(model, build())


@pytest.mark.parametrize("version", [1, 2])
def test_trained_model_gets_other_weights(two_ranks: RankPool, tmp_path: Path, version: int) -> None:
    write(tmp_path)
    assert max(two_ranks.run(reloaded, str(tmp_path), version)) < 1e-6


# Files of several kinds


def split_files(folder: Path, kind: str) -> str:
    """Write the model as several files, or in the form of torch.save; what to give prepare."""
    state = build().state_dict()
    if kind == "one file":
        save_file(state, folder / "odd name.safetensors")
        return str(folder / "odd name.safetensors")
    if kind == "nested pickled":
        torch.save({"state_dict": state, "epoch": 3}, folder / "a.pt")
        return str(folder / "a.pt")
    if kind == "pickled":
        torch.save(state, folder / "pytorch_model.bin")
        return str(folder)
    stem, end = ("model", "safetensors") if kind == "indexed" else ("pytorch_model", "bin")
    listed = {}
    for number in range(2):
        part = {name: state[name] for name in list(state)[number::2]}
        file = f"{stem}-0000{number + 1}-of-00002.{end}"
        (save_file if kind == "indexed" else torch.save)(part, folder / file)
        listed |= dict.fromkeys(part, file)
    (folder / f"{stem}.{end}.index.json").write_text(json.dumps({"weight_map": listed}))
    return str(folder)


@pytest.mark.parametrize(
    ("kind", "shards"),
    [
        ("indexed", "FSDP2"),
        ("one file", "flat"),
        ("pickled", "FSDP2"),
        ("nested pickled", "FSDP1 ignored"),
        ("pickled, indexed", "ignored"),
    ],
)
def test_files_of_every_form_are_read(two_ranks: RankPool, tmp_path: Path, kind: str, shards: str) -> None:
    where = split_files(tmp_path, kind)
    assert max(two_ranks.run(trained, where, KINDS[shards], {})) < 1e-5


# Names


def renamed(folder: str, changes: list[str]) -> float:
    differences = []
    for change in changes:
        if dist.get_rank() == 0:
            state = {change.format(name): value for name, value in build().state_dict().items()}
            save_file(state, Path(folder) / "model.safetensors")
        dist.barrier()
        model = on_meta()
        model.base_model_prefix = "model"
        model = fsdplaunch.prepare(model, plugin=plugin(fsdp_version=2), weights=folder)
        differences.append(apart(model, build()))
    return max(differences)


def test_names_are_found_through_wrappers_and_prefixes(two_ranks: RankPool, tmp_path: Path) -> None:
    changes = ["module.model.{}", "_orig_mod.{}", "model.{}", "{}"]
    assert max(two_ranks.run(renamed, str(tmp_path), changes)) < 1e-6


HEAD, LAYER = "head.weight", "layers.0.attention.qkv.weight"


def partly(folder: str, version: int, built: str) -> list[torch.Tensor]:
    """The head and a layer after loading without strictness."""
    torch.manual_seed(50 + dist.get_rank())
    model = on_meta() if built == "meta" else build(seed=7)
    if built == "meta":
        type(model.head).reset_parameters(model.head)
    model = fsdplaunch.prepare(model, plugin=plugin(fsdp_version=version), weights=folder, strict=False)
    full = weights(model)
    return [full[HEAD], full[LAYER]]


@pytest.mark.parametrize(("version", "built"), [(1, "meta"), (2, "real"), (2, "meta")])
def test_missing_tensors_are_the_models_own_where_that_is_allowed(
    two_ranks: RankPool, tmp_path: Path, version: int, built: str
) -> None:
    state = build().state_dict()
    del state[HEAD]
    save_file(state | {"other.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    (head, layer), (again, same) = two_ranks.run(partly, str(tmp_path), version, built)
    assert torch.equal(head, again)
    assert torch.equal(layer, same)
    assert torch.equal(layer, state[LAYER])
    assert built == "meta" or torch.equal(head, build(seed=7).state_dict()[HEAD])


# Buffers


class Rotary(nn.Module):
    """A buffer that no file holds, made again by the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", self.made(), persistent=False)

    def made(self) -> torch.Tensor:
        return 1.0 / (10.0 ** (torch.arange(4) / 4))

    def reset_parameters(self) -> None:
        self.frequencies.copy_(1.0 / (10.0 ** (torch.arange(4, device=self.frequencies.device) / 4)))


class Buffered(nn.Module):
    def __init__(self, rotary: type[nn.Module] = Rotary) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.norm = nn.BatchNorm1d(4)
        self.rotary = rotary()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) * self.rotary.frequencies


def buffered() -> Buffered:
    torch.manual_seed(3)
    model = Buffered()
    model.norm.running_mean.copy_(torch.arange(4.0))
    model.norm.num_batches_tracked.fill_(17)
    return model


def with_buffers(folder: str, version: int) -> tuple[float, list[float], int]:
    with torch.device("meta"):
        model = Buffered()
    model = fsdplaunch.prepare(model, plugin=plugin(fsdp_version=version), weights=folder).eval()
    inner = model.module if version == 1 else model
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        difference = (model(x) - buffered().eval()(x)).abs().max().item()
    norm = getattr(inner.norm, "module", inner.norm)
    return difference, norm.running_mean.tolist(), norm.num_batches_tracked.item()


@pytest.mark.parametrize("version", [1, 2])
def test_buffers_are_read_or_made_again(two_ranks: RankPool, tmp_path: Path, version: int) -> None:
    old = {"rotary.frequencies": torch.zeros(4, dtype=torch.bfloat16)}  # as files of earlier versions hold it
    save_file(buffered().state_dict() | old, tmp_path / "model.safetensors")
    for difference, mean, count in two_ranks.run(with_buffers, str(tmp_path), version):
        assert difference < 1e-6
        assert mean == [0.0, 1.0, 2.0, 3.0]
        assert count == 17


class Forgetful(Rotary):
    def reset_parameters(self) -> None:
        """Leaves the buffer as it is."""


# Refusals


def refusal(folder: str, case: str) -> str:
    from fsdplaunch.errors import LaunchError

    models = [nn.Linear(2, 2)] if case == "two models" else []
    fields = {"master_dtype": "fp16"} if case == "fp16 range" else {}
    with torch.device("meta"):
        model: nn.Module = Buffered(Forgetful) if case == "forgetful" else TinyLM(tied=case == "tied")
    if case != "forgetful":
        model.scale = torch.tensor(1.0)
    real = os.open

    def fail(path: Any, *rest: Any, **more: Any) -> int:
        if str(path).endswith(".safetensors"):
            raise OSError(13, "Permission denied")
        return real(path, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        if case == "rank 1 cannot" and dist.get_rank() == 1:
            patch.setattr(os, "open", fail)
        with pytest.raises(LaunchError) as refused:
            weights = False if case == "only rank 0" and dist.get_rank() else folder
            fsdplaunch.prepare(model, *models, plugin=plugin(fsdp_version=2, **fields), weights=weights)
    return str(refused.value)


def spoil(folder: Path, case: str) -> None:
    state = build().state_dict()
    changes: dict[str, Any] = {
        "missing": {"norm.weight": None},
        "unexpected": {"extra.bias": torch.ones(2)},
        "shape": {"norm.weight": torch.ones(17)},
        "int": {"norm.weight": torch.ones(16, dtype=torch.int32)},
        "fp8": {"norm.weight": torch.ones(16).to(torch.float8_e4m3fn)},
        "fp16 range": {"norm.weight": torch.full((16,), 1e6)},
        "tied": {"head.weight": torch.zeros(37, 16)},
    }
    if case == "forgetful":
        state = buffered().state_dict()
    state = {n: v for n, v in (state | changes.get(case, {})).items() if v is not None}
    if case == "pickle":
        torch.save({"a": Path("a")}, folder / "pytorch_model.bin")
        return
    save_file(state, folder / "model.safetensors")


REFUSED = {  # files that cannot be read: tests/unit/checkpoint/test_model_weights.py
    "missing": ['missing key(s) in the files: "norm.weight"', "weights_strict"],
    "unexpected": ['unexpected key(s) in the files: "extra.bias"'],
    "shape": ["size mismatch for norm.weight: [17] in the files, [16] in the model"],
    "int": ["'norm.weight' is I32 in the files, which torch.float32 of the model cannot represent"],
    "fp8": ["'norm.weight' is F8_E4M3 in the files", "quantized"],
    "fp16 range": ["'norm.weight' holds 1e+06, more than torch.float16 can represent"],
    "tied": ["are one parameter in the model and differ in the files"],
    "pickle": ["pytorch_model.bin", "which a tensor never needs", "nothing in it was run"],
    "rank 1 cannot": ["rank 1: cannot open", "Permission denied"],
    "only rank 0": ["the model gets weights from", "on rank 0 and values of its own on rank 1"],
    "two models": ["is for one model, and prepare was given 2"],
    "forgetful": ["rotary.frequencies has no values on any rank, and initializing Forgetful sets none"],
}


@pytest.mark.parametrize("case", REFUSED)
def test_weights_that_do_not_fit_are_refused_on_every_rank(two_ranks: RankPool, tmp_path: Path, case: str) -> None:
    spoil(tmp_path, case)
    texts = two_ranks.run(refusal, str(tmp_path), case, timeout=30)
    for text in texts:
        for words in REFUSED[case]:
            assert words in text


def configured(folder: str) -> tuple[float, bool, str]:
    """What the configuration says, without a word in the script."""
    from fsdplaunch.errors import LaunchError
    from fsdplaunch.runtime.sharding_watch import check_sharded

    difference = apart(fsdplaunch.prepare(on_meta()), build())
    same = apart(fsdplaunch.prepare(build(seed=5), weights=False), build(seed=5)) < 1e-6
    check_sharded("train.py")
    from fsdplaunch.runtime.loading import pretrained

    pretrained._used.clear()
    with pytest.raises(LaunchError) as forgotten:
        check_sharded("train.py")
    return difference, same, str(forgotten.value)


def test_weights_of_the_configuration_are_loaded_and_never_forgotten(two_ranks: RankPool, tmp_path: Path) -> None:
    write(tmp_path)
    env = {"FSDPLAUNCH_CHECKPOINT_WEIGHTS": str(tmp_path), "FSDP_VERSION": "2"}
    for difference, same, text in two_ranks.run(configured, str(tmp_path), env=env):
        assert difference < 1e-6
        assert same
        assert "was never read" in text


# Memory

MB = 1_000_000


def peak_while_loading(folder: str, fields: dict[str, Any], layers: int, width: int) -> float:
    """MB of anonymous memory at the worst moment, above what was there before."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    made = plugin(**fields, auto_wrap_policy=lambda module: isinstance(module, nn.Linear))
    with Peak() as peak:
        fsdplaunch.prepare(model, plugin=made, weights=folder)
    return peak.grown / MB


@pytest.mark.parametrize(("version", "dtype"), [(1, torch.bfloat16), (2, torch.float32)])
def test_no_rank_ever_holds_more_than_its_shard_and_a_buffer(
    two_ranks: RankPool, tmp_path: Path, version: int, dtype: torch.dtype
) -> None:
    layers, width = 3, 4096  # 67 MB each in fp32
    torch.manual_seed(0)
    state = {f"{n}.weight": torch.zeros(width, width, dtype=dtype) for n in range(layers)}
    save_file(state, tmp_path / "model.safetensors")
    shard = layers * width * width * 4 / 2 / MB
    for peak in two_ranks.run(peak_while_loading, str(tmp_path), {"fsdp_version": version}, layers, width):
        assert shard * 0.9 < peak < shard + 32
