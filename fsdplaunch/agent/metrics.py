"""`launch.metrics`: what the workers record, for others' tools: JSON lines, TensorBoard, Prometheus. In the agent.

Rank 0's agent reads the records that it sees, once a second, in a thread: the workers do nothing for it.
"""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import isnan
from pathlib import Path
from statistics import fmean, median
from typing import Any

from fsdplaunch.launch.step_summary import read_ranks, summarize
from fsdplaunch.step_record import RankSteps, Step

_SECONDS = 1.0
_REQUEST_SECONDS = 5.0  # how long a client may take to ask
_JOIN_SECONDS = 10.0
_MEANS = ("data_seconds", "peer_seconds", "gradient_norm")
_SUMS = ("samples", "tokens")
_MOST = ("memory_bytes", "peak_bytes", "skipped")
Row = dict[str, Any]


class MetricsExport:
    """Hands on the steps of a run, each once all ranks have made it."""

    def __init__(self, run_dir: Path, metrics: Mapping[str, str], say: Callable[[str], None]) -> None:
        """Begin; what cannot be written is said once, and the run goes on without it."""
        self._run_dir, self._say = run_dir, say
        self._pid, self._last = 0, 0
        self._ended, self.is_ready = threading.Event(), threading.Event()
        self._sinks: dict[str, Callable[[Row], None]] = {}
        self._open = ExitStack()
        openers = {"jsonl": self._open_lines, "tensorboard": self._open_tensorboard, "prometheus": self._serve}
        self._thread = threading.Thread(target=self._run, args=(openers, dict(metrics)), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write what is left."""
        self._ended.set()
        self._thread.join(_JOIN_SECONDS)

    def _run(self, openers: Mapping[str, Callable[[str], None]], metrics: Mapping[str, str]) -> None:
        for name, value in metrics.items():
            self._try(name, partial(openers[name], value))
        self.is_ready.set()
        with self._open:
            while not self._ended.wait(_SECONDS):
                self._look()
            self._look()

    def _look(self) -> None:
        for row in self._new_rows(read_ranks(self._run_dir)):
            for name, write in list(self._sinks.items()):
                self._try(name, partial(write, row))

    def _try(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # a full disk, a port in use, whatever TensorBoard raises
            self._sinks.pop(name, None)
            self._say(f"launch.metrics: stopped writing {name}: {type(error).__name__}: {error}")

    def _new_rows(self, ranks: Mapping[int, RankSteps]) -> Iterator[Row]:
        if ranks and (pid := next(iter(ranks.values())).pid) != self._pid:
            self._pid, self._last = pid, 0  # started again: its steps count from 1
        by_number: dict[int, list[Step]] = {}
        for record in ranks.values():
            for step in record.recent:
                by_number.setdefault(int(step.number), []).append(step)
        complete = [number for number, steps in by_number.items() if len(steps) == len(ranks)]
        new = sorted(number for number in complete if number > self._last)
        found = summarize(ranks).to_dict() if new else {}
        for number in new:
            self._last = number
            yield {**_row(by_number[number]), "bound_by": found["bound_by"], "slowest": found["slowest"]}

    def _open_lines(self, path: str) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        file = self._open.enter_context(open(path, "a", encoding="utf-8", buffering=1))  # noqa: PTH123, SIM115  (the stack closes it)
        self._sinks["jsonl"] = lambda row: print(json.dumps(row), file=file)

    def _open_tensorboard(self, folder: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        writer: Any = SummaryWriter(folder, flush_secs=10)
        self._open.callback(writer.close)

        def write(row: Row) -> None:
            for name, value in row.items():
                if name not in ("step", "time") and isinstance(value, int | float):
                    writer.add_scalar(f"fsdplaunch/{name}", value, row["step"], row["time"])

        self._sinks["tensorboard"] = write

    def _serve(self, port: str) -> None:
        run_dir = self._run_dir

        class Handler(BaseHTTPRequestHandler):
            timeout = _REQUEST_SECONDS

            def do_GET(self) -> None:
                text = prometheus_text(read_ranks(run_dir)).encode() if self.path == "/metrics" else b""
                self.send_response(200 if text else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                with suppress(OSError):
                    self.wfile.write(text)

            def log_message(self, *_: object) -> None:
                pass  # nothing on the terminal

        server = ThreadingHTTPServer(("127.0.0.1", int(port)), Handler)
        self._open.callback(server.server_close)
        self._open.callback(server.shutdown)
        threading.Thread(target=server.serve_forever, daemon=True).start()


def _row(steps: list[Step]) -> Row:
    """Return one step of all ranks: the median of its time, sums over ranks, means, and the largest."""

    def known(name: str) -> list[float]:
        return [value for step in steps if not isnan(value := getattr(step, name))]

    ways: dict[str, Any] = {
        **dict.fromkeys(_MEANS, fmean),
        **dict.fromkeys(_SUMS, sum),
        **dict.fromkeys(_MOST, max),
    }
    seconds = median(known("seconds")) if known("seconds") else None
    row: Row = {"time": max(step.ended for step in steps), "step": int(steps[0].number), "step_seconds": seconds}
    row |= {name: way(known(name)) if known(name) else None for name, way in ways.items()}
    rates = {f"{name}_per_second": row[name] / seconds if seconds and row[name] else None for name in _SUMS}
    return {**row, **rates}


def prometheus_text(ranks: Mapping[int, RankSteps]) -> str:
    """Return the last steps of a run as Prometheus reads them."""
    found = summarize(ranks).to_dict()
    slowest = found["slowest"] or {}
    lines = []

    def add(name: str, kind: str, values: Mapping[str, Any]) -> None:
        known = {labels: value for labels, value in values.items() if value is not None}
        if known:
            lines.append(f"# TYPE fsdplaunch_{name} {kind}")
            lines.extend(f"fsdplaunch_{name}{labels} {value}" for labels, value in known.items())

    for name in ("step", "step_seconds", "data_seconds", "peer_seconds", "memory_bytes", "peak_bytes"):
        values = {f'{{rank="{row["rank"]}"}}': row[name] for row in found["ranks"]}
        add("steps_total" if name == "step" else name, "counter" if name == "step" else "gauge", values)
    for name in ("steps_per_second", "samples_per_second", "tokens_per_second"):
        add(name, "gauge", {"": found[name]})
    if found["bound_by"] is not None:
        add("bound", "gauge", {f'{{by="{found["bound_by"]}"}}': 1})
    if slowest:
        add(
            "slowest_factor",
            "gauge",
            {f'{{rank="{slowest["rank"]}",cause="{slowest["cause"]}"}}': slowest["factor"]},
        )
    return "\n".join([*lines, ""])
