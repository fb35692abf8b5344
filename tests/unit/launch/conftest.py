"""Workers and records as the agent writes them."""

from collections.abc import Callable
from typing import Any

import pytest

SECOND = 10**9


def make_worker(
    rank: int = 0,
    *,
    code: int | None = 1,
    at: float = 1.0,
    message: str | None = None,
    status: int = 1,
    traceback: str | None = None,
    sent: tuple[int, ...] = (),
    tail: tuple[str, ...] = (),
    **more: Any,
) -> dict[str, Any]:
    """A worker that ended `at` seconds after its start."""
    error = message and {"message": message, "traceback": traceback, "time_ns": int(at * SECOND), "status": status}
    names = {-9: "SIGKILL", -11: "SIGSEGV", -6: "SIGABRT", -7: "SIGBUS", -15: "SIGTERM"}
    return {
        "rank": rank,
        "local_rank": rank,
        "pid": 100 + rank,
        "code": code,
        "signal": names.get(code or 0),
        "sent": list(sent),
        "started_ns": 0,
        "ended_ns": int(at * SECOND) + 5,
        "peak_bytes": None,
        "steps": None,
        "error": error,
        "tail": list(tail),
    } | more


@pytest.fixture
def worker() -> Callable[..., dict[str, Any]]:
    return make_worker


@pytest.fixture
def record() -> Callable[..., dict[str, Any]]:
    """Return a function that makes an agent's record of one attempt with these workers."""
    from fsdplaunch.launch.root_cause import first_failure

    def make(*workers: dict[str, Any], **more: Any) -> dict[str, Any]:
        attempt = {
            "attempt": 0,
            "started_ns": 1,
            "ended_ns": 3 * SECOND,
            "workers": list(workers),
            "cause": first_failure(workers),
        }
        return {"attempts": [attempt], "stopped_by": None, "host": "node-1"} | more

    return make
