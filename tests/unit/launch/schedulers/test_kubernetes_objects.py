"""The Kubernetes objects, held against the real schemas; there is no API server here."""

import base64
from dataclasses import replace
from typing import Any

import pytest
import yaml

from fsdplaunch.config.schema.config import Config, KubernetesSection, LaunchSection
from fsdplaunch.errors import UsageError
from fsdplaunch.launch.schedulers.kubernetes import PROGRAM, object_name, objects

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="needs the dev extra kubernetes-validate")

VERSIONS = ("1.31", kubernetes_validate.latest_version())
"""podFailurePolicy became stable in 1.31."""
FULL = KubernetesSection(
    image="registry/train:1",
    namespace="team",
    working_dir="/app",
    resources={"limits": {"nvidia.com/gpu": 8, "memory": "200Gi"}, "requests": {"cpu": 12.5}},
    volumes={"/data": "a-claim", "/scratch": {"hostPath": {"path": "/mnt/scratch"}}},
    shm_size="64Gi",
    secrets=("wandb",),
    pull_secrets=("registry",),
    service_account="trainer",
    node_selector={"gpu": "h100", "big": True},
    user=1000,
)
SECRETS = {"FSDPLAUNCH_SECRET": "ab" * 32, "HF_TOKEN": "hunter2"}
ODD = [
    "a b",
    "$(HOME)",
    "$$(HOME)",
    "$HOME",
    "a$",
    "$$$",
    'it\'s "quoted"',
    "two\nlines",
    "`id`",
    "*",
    "true",
    "1e5",
    "- x: y",
]
WORDS = [*PROGRAM, "launch", "--config", "/etc/fsdplaunch/config.yaml", "my train.py", *ODD]


def make(kube: KubernetesSection = FULL, *, machines: int = 2, **more: Any) -> list[dict[str, Any]]:
    config = Config(num_machines=machines, kubernetes=kube, **more)
    run_id = "2026-11-21_034031-9c94"
    return objects(config, WORDS, run_id=run_id, snapshot="num_machines: 2\n", secrets=SECRETS)


def by_kind(made: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {one["kind"]: one for one in made}


@pytest.mark.parametrize("kube", [FULL, KubernetesSection(image="i")], ids=["full", "least"])
@pytest.mark.parametrize("machines", [1, 2])
def test_objects_of_a_job_pass_the_schemas_of_kubernetes(kube, machines):
    made = make(kube, machines=machines)
    assert [one["kind"] for one in made] == ["ConfigMap", "Secret", *(["Service"] if machines > 1 else []), "Job"]
    for one in yaml.safe_load_all(yaml.safe_dump_all(made)):
        for version in VERSIONS:
            kubernetes_validate.validate(one, version, strict=True)


def test_secrets_stand_in_the_secret_alone_and_containers_refer_to_it():
    secret, *others = sorted(make(KubernetesSection(image="i")), key=lambda one: one["kind"] != "Secret")
    assert {name: base64.b64decode(text).decode() for name, text in secret["data"].items()} == SECRETS
    shown = yaml.safe_dump_all(others)
    assert not any(value in shown or value in yaml.safe_dump(secret) for value in SECRETS.values())
    for name in SECRETS:
        assert f"- name: {name}\n" in shown
    assert shown.count(f"name: {secret['metadata']['name']}") > len(SECRETS)


def test_words_reach_the_container_unchanged():
    place = container(yaml.safe_load(yaml.safe_dump(make()[-1])))
    assert [expand(word) for word in [*place["command"], *place["args"]]] == WORDS


def container(job: dict[str, Any]) -> dict[str, Any]:
    return job["spec"]["template"]["spec"]["containers"][0]


def expand(word: str) -> str:
    """What the kubelet does (third_party/forked/golang/expansion): $$ is $, $(NAME) a variable, the rest stays."""
    done, rest = "", word
    while rest:
        if rest.startswith("$$"):
            done, rest = done + "$", rest[2:]
        elif rest.startswith("$("):
            name, _, rest = rest[2:].partition(")")
            done += f"<{name}>"
        else:
            done, rest = done + rest[0], rest[1:]
    return done


def test_pods_drop_privileges_and_find_each_other():
    made = by_kind(make())
    pod = made["Job"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container(made["Job"])["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    name = made["Job"]["metadata"]["name"]
    env = {one["name"]: one["value"] for one in container(made["Job"])["env"] if "value" in one}
    assert env["FSDPLAUNCH_MAIN_PROCESS_IP"] == f"{name}-0.{pod['subdomain']}"
    assert env["FSDPLAUNCH_GROUP_RUN"] == "2026-11-21_034031-9c94/"  # each start of the pods is a folder in it
    assert made["Service"]["metadata"]["name"] == pod["subdomain"]
    assert made["Service"]["spec"]["selector"] == {"job-name": name}
    assert pod["terminationGracePeriodSeconds"] == 45
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}} in pod["volumes"]


def test_exit_codes_decide_what_the_job_does():
    rules = by_kind(make())["Job"]["spec"]["podFailurePolicy"]["rules"]
    actions = {code: rule["action"] for rule in rules for code in rule.get("onExitCodes", {}).get("values", [])}
    assert actions == {75: "Ignore", 2: "FailJob"}


@pytest.mark.parametrize(
    ("kube", "launch", "said"),
    [
        (KubernetesSection(), LaunchSection(), "kubernetes.image is not set"),
        (FULL, LaunchSection(nodes="1:2"), "is elastic"),
        (replace(FULL, resources={"gpu": 8}), LaunchSection(), "kubernetes.resources holds gpu"),
    ],
)
def test_what_cannot_be_said_to_kubernetes_is_refused(kube, launch, said):
    with pytest.raises(UsageError, match=said):
        make(kube, launch=launch)


def test_object_name_is_a_dns_label():
    assert object_name("2026-11-21_034031-9c94") == "fsdp-2026-11-21-034031-9c94"
    assert len(object_name("x" * 100)) <= 52
