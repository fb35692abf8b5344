"""A run on Kubernetes that is followed, listed and cancelled. There is no cluster here.

The states are read from objects that pass the real schemas. In kubectl's place stands a program that writes down
what it is asked and answers with such objects: it shows which commands are sent, not what a cluster makes of them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdplaunch.launch.schedulers import kubernetes

KUBECTL = """
import json, pathlib, sys
here = pathlib.Path(__file__).parent
words = sys.argv[1:]
with (here / "asked").open("a") as file:
    file.write(json.dumps(words) + "\\n")
if words[2] == "apply":
    (here / "objects.yaml").write_text(sys.stdin.read())
    print("applied")
if words[2] == "logs":
    sys.stdout.write(f"printed by {words[-1]}\\n")  # in one piece: they run side by side
if words[2] == "get":
    answers = json.loads((here / words[3]).read_text())
    print(json.dumps(answers.pop(0)) if answers[0] else "")
    if answers:
        (here / words[3]).write_text(json.dumps(answers))
"""
CONDITION = {"type": "Complete", "status": "True", "reason": "CompletionsReached"}
FAILED = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}


def job(**status: Any) -> dict[str, Any]:
    container = {"name": "trainer", "image": "i"}
    template = {"spec": {"restartPolicy": "Never", "containers": [container]}}
    spec = {"parallelism": 2, "completions": 2, "template": template}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "n"}, "spec": spec, "status": status}


@pytest.mark.parametrize(
    ("found", "state"),
    [
        ({}, ("deleted", False)),
        (job(), ("pending", True)),
        (job(active=2, ready=0), ("pending", True)),
        (job(active=2, ready=1), ("running (1 of 2 pods ready)", True)),
        (job(succeeded=2, conditions=[CONDITION]), ("done", False)),
        (job(failed=1, conditions=[FAILED]), ("failed: BackoffLimitExceeded", False)),
        (job(active=1, ready=1, conditions=[FAILED | {"status": "False"}]), ("running (1 of 2 pods ready)", True)),
        (job(conditions=[{"type": "Suspended", "status": "True"}]), ("suspended", True)),
    ],
)
def test_state_of_an_object_is_read_from_its_status(monkeypatch, found: dict[str, Any], state: tuple[str, bool]):
    monkeypatch.setattr(kubernetes, "read", lambda *_: found)
    assert kubernetes.state_of({"name": "n"}) == state


def pod(number: int, phase: str, *, code: int | None = None, at: str = "") -> dict[str, Any]:
    end = {"terminated": {"exitCode": code, "finishedAt": at}} if code is not None else {"running": {}}
    labels = {"batch.kubernetes.io/job-completion-index": str(number)}
    containers = [{"name": name, "state": end} for name in ("trainer", "node")]
    status = {"phase": phase, "containerStatuses": containers}
    return {"metadata": {"name": f"pod-{number}", "labels": labels}, "status": status}


class Cluster:
    """A folder with the program in kubectl's place, what it was asked, and what it answers."""

    def __init__(self, folder: Path) -> None:
        self.programs, self.folder = folder / "bin", folder
        self.programs.mkdir()
        (self.programs / "kubectl").write_text(f"#!{sys.executable}\n{KUBECTL}")
        (self.programs / "kubectl").chmod(0o755)
        (folder / "t.py").write_text("")

    def answers(self, **to: list[Any]) -> None:
        for what, answers in to.items():
            (self.programs / what).write_text(json.dumps(answers))

    def asked(self) -> list[list[str]]:
        file = self.programs / "asked"
        asked = [json.loads(line) for line in file.read_text().splitlines()]
        file.unlink()
        assert all(words[:2] == ["--namespace", "team"] for words in asked)
        return [words[2:] for words in asked]

    def run(self, *words: str) -> "subprocess.CompletedProcess[str]":
        environ = {name: value for name, value in os.environ.items() if not name.startswith("FSDP")}
        return subprocess.run(
            [sys.executable, "-m", "fsdplaunch", *words],
            cwd=self.folder,
            env=environ | {"PATH": f"{self.programs}:/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=60,
        )


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


LAUNCH = ("launch", "--kubernetes", "--use-cpu", "--kubernetes.image", "i", "--kubernetes.namespace", "team")


def test_followed_run_prints_its_pods_and_ends_with_the_status_that_came_first(cluster: Cluster):
    ended = [
        pod(0, "Failed", code=1, at="2026-01-01T00:00:09Z"),
        pod(1, "Failed", code=7, at="2026-01-01T00:00:08Z"),
    ]
    lists = [[pod(0, "Pending")], [pod(1, "Running"), pod(0, "Running")], ended, ended]
    running, failed = job(ready=2), job(conditions=[FAILED])
    cluster.answers(job=[job(), running, failed, failed, failed], pods=[{"items": pods} for pods in lists])
    words = (*LAUNCH, "--follow", "--num-machines", "2", "t.py")
    done = cluster.run(*words)
    assert done.returncode == 7, done.stderr
    assert sorted(done.stdout.splitlines()) == ["printed by pod-0", "printed by pod-1"]
    (told,) = (cluster.folder / "runs").glob("2*")
    name = json.loads((told / "job.json").read_text())["name"]
    selector = f"job-name={name}"
    assert f"job {name}: running" in done.stderr
    assert "failed: BackoffLimitExceeded" in done.stderr
    asked = cluster.asked()
    logs = sorted(words for words in asked if words[0] == "logs")
    assert logs == [["logs", "--follow", "--container", "trainer", f"pod-{number}"] for number in (0, 1)]
    assert asked[0] == ["apply", "-f", "-"]
    assert asked[1] == asked[2] == ["get", "job", name, "--ignore-not-found", "--output", "json"]
    assert asked[3] == ["get", "pods", "--selector", selector, "--ignore-not-found", "--output", "json"]


def test_submitted_run_is_listed_by_what_the_cluster_says_shown_and_cancelled(cluster: Cluster):
    told = json.loads(cluster.run(*LAUNCH, "--json", "t.py").stdout)
    name = told["name"]
    cluster.asked()
    cluster.answers(job=[job(active=2, ready=2)] * 2)
    (listed,) = json.loads(cluster.run("runs", "--json").stdout)
    assert (listed["state"], listed["unfinished"]) == ("running (2 of 2 pods ready)", True)
    shown = cluster.run("runs", "logs", "latest")
    assert shown.stdout == f"printed by job-name={name}\n"
    assert cluster.asked()[-1] == ["logs", "--tail=-1", "--container", "trainer", "--selector", f"job-name={name}"]
    cluster.answers(job=[job(active=2, ready=2), None])
    done = cluster.run("runs", "cancel", "latest")
    assert done.returncode == 0, done.stderr
    kinds = [words for words in cluster.asked() if words[0] == "delete"]
    flags = ["--ignore-not-found", "--wait=false"]
    assert kinds == [["delete", *flags, kind, name] for kind in ("job", "service", "secret", "configmap")]
    again = cluster.run("runs", "cancel", "latest")
    assert again.returncode == 2
    assert "is not running: deleted" in again.stderr
