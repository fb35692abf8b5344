"""What `launch.metrics` writes for others' tools, from records as workers write them."""

import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import pytest

from fsdplaunch.agent.metrics import MetricsExport
from fsdplaunch.config.layers import read_assignments
from fsdplaunch.config.problems import ConfigError
from fsdplaunch.config.resolve import resolve
from fsdplaunch.config.schema.config import build_config
from fsdplaunch.launch.preflight import check_metrics
from fsdplaunch.run_dir import rank_folder
from fsdplaunch.step_record import Step, StepWriter


def writers(run_dir: Path, count: int = 2) -> list[StepWriter]:
    folders = [rank_folder(run_dir, rank) for rank in range(count)]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    return [StepWriter(folder) for folder in folders]


def make_steps(writer: StepWriter, count: int, seconds: float = 0.5) -> None:
    for _ in range(count):
        writer.count(100.0 + writer.made)
        writer.add(Step(writer.made, 100.0 + writer.made, seconds, 0.1, 0.2, 5e6, 7e6, 8, 64, 1.5))


@pytest.fixture
def export(tmp_path: Path) -> Callable[..., list[str]]:
    """Exports a run's records to its end; returns what was said."""

    def run(**metrics: str) -> list[str]:
        said: list[str] = []
        MetricsExport(tmp_path, metrics, said.append).close()
        return said

    return run


def test_each_step_is_a_line_once_all_ranks_have_made_it(tmp_path, export):
    first, second = writers(tmp_path)
    make_steps(first, 4, 0.4)
    make_steps(second, 3, 0.6)
    assert export(jsonl=str(tmp_path / "new" / "steps.jsonl")) == []
    rows = [json.loads(line) for line in (tmp_path / "new" / "steps.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[0] == {
        **{"time": 101.0, "step": 1, "step_seconds": 0.5, "data_seconds": 0.1, "peer_seconds": 0.2},
        **{"memory_bytes": 5e6, "peak_bytes": 7e6, "samples": 16, "tokens": 128, "gradient_norm": 1.5},
        **{"skipped": 0, "samples_per_second": 32, "tokens_per_second": 256, "bound_by": None, "slowest": None},
    }


def test_tensorboard_gets_the_numbers_at_their_steps(tmp_path, export, monkeypatch):
    written: list[Any] = []
    writer = SimpleNamespace(add_scalar=lambda *of: written.append(of), close=lambda: written.append("closed"))
    stand_in = SimpleNamespace(SummaryWriter=lambda folder, flush_secs: writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stand_in)
    make_steps(writers(tmp_path, 1)[0], 2)
    assert export(tensorboard=str(tmp_path)) == []
    assert ("fsdplaunch/step_seconds", 0.5, 2, 102.0) in written
    assert written[-1] == "closed"


def test_prometheus_is_answered_on_loopback_until_the_end(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for writer in writers(tmp_path):
        make_steps(writer, 3)
    said: list[str] = []
    export = MetricsExport(tmp_path, {"prometheus": str(port)}, said.append)
    assert export.is_ready.wait(10)
    with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    export.close()
    assert 'fsdplaunch_steps_total{rank="1"} 3' in lines
    assert "fsdplaunch_tokens_per_second 256.0" in lines
    assert said == []
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port)).close()


def test_what_cannot_be_written_is_said_once_and_the_rest_goes_on(tmp_path, export, monkeypatch):
    written: list[Any] = []

    def fill_up(*_: object) -> None:
        written.append(None)
        raise OSError(28, "No space left on device")

    writer = SimpleNamespace(add_scalar=fill_up, close=lambda: None)
    stand_in = SimpleNamespace(SummaryWriter=lambda folder, flush_secs: writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stand_in)
    make_steps(writers(tmp_path, 1)[0], 3)
    (said,) = export(tensorboard="tb", jsonl=str(tmp_path / "steps.jsonl"))
    assert said.startswith("launch.metrics: stopped writing tensorboard: OSError: [Errno 28] No space")
    assert len(written) == 1
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        ("{wandb: x}", "must name jsonl, tensorboard or prometheus, got wandb"),
        ("{prometheus: 70000}", "prometheus must be a port, from 1 to 65535, got 70000"),
        ("{jsonl: ''}", "must give jsonl a value"),
    ],
)
def test_what_nobody_writes_is_refused(value, wrong):
    with pytest.raises(ConfigError, match=wrong):
        read_assignments([f"launch.metrics={value}"])


def obstacles(**launch: Any) -> list[str]:
    values = {("launch", name): value for name, value in launch.items()}
    return [finding.message for finding in check_metrics(resolve(build_config(values)))]


def test_what_is_missing_is_said_before_the_start(monkeypatch):
    monkeypatch.setattr("fsdplaunch.launch.preflight.find_spec", lambda _: None)
    assert "needs tensorboard" in obstacles(metrics={"tensorboard": "tb"})[0]
    assert "launch.measure is false" in obstacles(metrics={"jsonl": "a"}, measure=False)[0]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert obstacles(metrics={"prometheus": str(port)}) == [
            f"launch.metrics.prometheus: port {port} is in use, as ss -ltnp shows"
        ]
    assert obstacles(metrics={"jsonl": "a"}) == []
