"""The pods of a Kubernetes Job without Kubernetes: what its object tells the kubelet is done here by hand.

Each pod is a network namespace. Words, environment and configuration are the object's own; that a cluster takes
it, places the pods and resolves their names is not shown.
"""

import base64
import sys
from pathlib import Path
from typing import Any

import yaml

from fsdplaunch.launch.schedulers.kubernetes import CONFIG_FOLDER, CONFIG_KEY
from tests.cluster.lab import Lab, finish

OPTIONS = (
    *("--kubernetes", "--dry-run", "--set", "launch.env={HF_TOKEN: t0ken}", "--kubernetes.image", "i"),
    *("--num-machines", "2", "--show-ranks", "all", "--main-process-port", "29700"),
    *("--distributed-type", "MULTI_CPU", "--nproc-per-node", "1", "--use-cpu"),
)
ODD = ["a b", "$(HOME)", "$$", 'it\'s "quoted"', "two\nlines", "*"]


def value_of(entry: dict[str, Any], secret: dict[str, Any]) -> str:
    """What the kubelet gives a container's variable: its value, or that in the Secret it refers to."""
    if "value" in entry:
        return entry["value"]
    place = entry["valueFrom"]["secretKeyRef"]
    assert place["name"] == secret["metadata"]["name"]
    return base64.b64decode(secret["data"][place["key"]]).decode()


def pod(three: Lab, number: int, objects: dict[str, Any], config: Path, programs: Path, cwd: Path):
    """Start a pod's container as the kubelet does, in a namespace."""
    (container,) = objects["Job"]["spec"]["template"]["spec"]["containers"]
    words = [word.replace("$$", "$") for word in [*container["command"], *container["args"]]]  # none is $(NAME)
    words[words.index(f"{CONFIG_FOLDER}/{CONFIG_KEY}")] = str(config)
    env = {one["name"]: value_of(one, objects["Secret"]) for one in container["env"]}
    own = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": str(number)}
    return three.start(number, *words, cwd=cwd, PATH=f"{programs}:/usr/sbin:/usr/bin:/sbin:/bin", **env, **own)


def test_pods_of_a_job_find_each_other_and_run_what_the_object_says(three: Lab, folder: Path):
    status, text, err = finish(three.launch(0, *OPTIONS, "sum.py", *ODD, cwd=folder))
    assert status == 0, err
    objects = {one["kind"]: one for one in yaml.safe_load_all(text)}
    config, programs = folder / "mounted.yaml", folder / "bin"
    assert "t0ken" not in text  # it is in the Secret
    config.write_text(objects["ConfigMap"]["data"][CONFIG_KEY])
    programs.mkdir()  # the image's
    (programs / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (programs / "python3").chmod(0o755)
    name, service = (objects[kind]["metadata"]["name"] for kind in ("Job", "Service"))
    tables = {path: path.read_text() for path in (Path("/etc/netns", three.name(k), "hosts") for k in range(2))}
    try:
        for table, before in tables.items():  # what the headless service adds
            table.write_text(f"{before}{three.address(0)} {name}-0.{service}\n")
        pods = [pod(three, number, objects, config, programs, folder) for number in range(2)]
        (code0, out0, err0), (code1, out1, err1) = (finish(one) for one in pods)
    finally:
        for table, before in tables.items():
            table.write_text(before)
    assert (code0, code1) == (0, 0), err0 + err1
    assert f"rank 0 of 2 on host0 sum 3.0 {ODD!r}" in out0
    assert f"rank 1 of 2 on host1 sum 3.0 {ODD!r}" in out1
    (start,) = (path for path in (folder / "runs").glob("*/*") if path.is_dir() and not path.is_symlink())
    assert start.parent.name.replace("_", "-") == name.removeprefix("fsdp-")  # a folder for each start of the pods
    assert (start / "result.json").exists()
    assert (start / "node1" / "result.json").exists()
