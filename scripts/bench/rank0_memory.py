"""Peak of rank 0's memory while it saves alone: `scripts/bench/save memory`."""

import ctypes
import gc
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

WIDTH = 2048


class Layers(PreTrainedModel):
    """Equal layers, one after the other."""

    config_class = PretrainedConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(config.layers)))

    def forward(self, x: Any) -> Any:
        return self.layers(x)


def measure(gigabytes: float, ranks: int, folder: Path | None) -> None:
    """Print, for each way to save, the peak of the anonymous memory of rank 0, beyond what it holds before."""
    from multiprocessing import get_context

    with tempfile.TemporaryDirectory(dir=folder, prefix="bench-save-") as name:
        context = get_context("spawn")
        processes = [context.Process(target=_rank, args=(rank, ranks, gigabytes, name)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit("a rank failed")


def _rank(rank: int, ranks: int, gigabytes: float, folder: str) -> None:
    import torch
    import torch.distributed as dist

    from fsdplaunch.config.environment import encode
    from fsdplaunch.config.resolve import resolve
    from fsdplaunch.config.schema.config import build_config
    from fsdplaunch.runtime.auto import HookContext
    from fsdplaunch.runtime.auto.install import hooks
    from fsdplaunch.runtime.auto.rank0.service import close

    torch.set_num_threads(1)
    keys = {
        ("distributed_type",): "FSDP", ("use_cpu",): True, ("num_processes",): ranks,
        ("fsdp_config", "fsdp_version"): 2, ("fsdp_config", "fsdp_auto_wrap_policy"): "SIZE_BASED_WRAP",
        ("fsdp_config", "fsdp_min_num_params"): 1,
    }  # fmt: skip
    config = resolve(build_config(keys))
    os.environ.update(encode(config))
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    with hooks(HookContext(config, torch.device("cpu"), rank=rank, size=ranks)):
        model, optimizer = _trained(gigabytes)
        if rank == 0:
            _report(model, optimizer, Path(folder))
        dist.barrier()
        _together("  by all ranks", model.module, Path(folder), rank)
        del model, optimizer
        flat = _by_fsdp1(gigabytes)
        _together("  under FSDP1", flat.module, Path(folder), rank)
        dist.barrier()
        close()
    dist.destroy_process_group()


def _trained(gigabytes: float) -> tuple[Any, Any]:
    """A model of `gigabytes` (fp32) that a script gives to DDP, and an AdamW that has made a step."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(Layers(PretrainedConfig(layers=_layers(gigabytes))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _report(model: Any, optimizer: Any, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file, save_model

    module = model.module
    ways: dict[str, Callable[[Path], Any]] = {
        "torch.save, model": lambda file: torch.save(module.state_dict(), file),
        "torch.save, both": lambda file: torch.save([module.state_dict(), optimizer.state_dict()], file),
        "torch.save, copies": lambda file: torch.save({k: v.cpu() for k, v in module.state_dict().items()}, file),
        "torch.save, module": lambda file: torch.save(module, file),
        "save_file": lambda file: save_file(module.state_dict(), file),
        "save_model": lambda file: save_model(module, file),
        "save_pretrained": module.save_pretrained,
        "in files of 50 MB": lambda folder: module.save_pretrained(folder, max_shard_size="50MB"),
    }
    largest = max(param.numel() * param.element_size() for param in model.parameters()) / 1e6
    print(f"largest tensor {largest:.0f} MB; peak is over what rank 0 held before")
    print(f"{'way':20} {'file MB':>8} {'peak MB':>8} {'tensors':>8} {'seconds':>8}")
    for name, save in ways.items():
        _print(name, save, folder / "file", largest)


def _by_fsdp1(gigabytes: float) -> Any:
    """The model in FSDP1's wrapper, with one around each layer."""
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    from fsdplaunch.runtime.compat.fsdp1 import gather_with_all_ranks
    from fsdplaunch.runtime.compat.hugging_face import adapt_hugging_face

    adapt_hugging_face()
    gather_with_all_ranks()
    model = Layers(PretrainedConfig(layers=_layers(gigabytes)))
    by_layer, cpu = ModuleWrapPolicy({nn.Linear}), torch.device("cpu")
    return FullyShardedDataParallel(model, auto_wrap_policy=by_layer, device_id=cpu, use_orig_params=True)


def _layers(gigabytes: float) -> int:
    return max(2, round(gigabytes * 1e9 / (WIDTH * WIDTH * 4)))


def _together(name: str, module: Any, folder: Path, rank: int) -> None:
    """Save on all ranks, and print it on the first."""
    largest = WIDTH * WIDTH * 4 / 1e6

    def save(to: Path) -> None:
        module.save_pretrained(to)

    if rank == 0:
        _print(name, save, folder / "file", largest)
    else:
        save(folder / "file")


def _print(name: str, save: Callable[[Path], Any], target: Path, largest: float) -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that is free in this process would hide what is taken
    before = _anonymous()
    start = time.perf_counter()
    with _Peak() as measured:
        save(target)
    seconds = time.perf_counter() - start
    peak = measured.peak - before
    files = [target] if target.is_file() else list(target.iterdir())
    size = sum(file.stat().st_size for file in files) / 1e6
    print(f"{name:20} {size:8.0f} {peak:8.0f} {peak / largest:8.1f} {seconds:8.2f}", flush=True)
    for file in files:
        file.unlink()
    if target.exists():
        target.rmdir()


class _Peak:
    """Looks at this process' anonymous memory while a block runs: what is in files the system may write out."""

    def __enter__(self) -> "_Peak":
        self.peak, self.ended = 0.0, threading.Event()
        self.thread = threading.Thread(target=self._look)
        self.thread.start()
        return self

    def _look(self) -> None:
        while not self.ended.wait(0.001):
            self.peak = max(self.peak, _anonymous())

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()


def _anonymous() -> float:
    """This process' anonymous memory, in MB."""
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("RssAnon")).split()[1]) / 1000
