"""Keys change inside a file's text; comments and every other key stay."""

import pytest

from fsdplaunch.config.problems import ConfigError
from fsdplaunch.config.render import set_keys, write_text_atomically
from fsdplaunch.config.schema.config import keys_by_path, value_at
from fsdplaunch.errors import LaunchError, UsageError
from tests.yaml_config import config_of

VERSION = ("fsdp_config", "fsdp_version")
OFFLOAD = ("fsdp_config", "fsdp_offload_params")
BLOCKS = ("fsdp_config", "fsdp_transformer_layer_cls_to_wrap")
PROCESSES = ("num_processes",)
ENV = ("launch", "env")


def edit(text, *changes):
    return set_keys(text, [(keys_by_path()[path], value) for path, value in changes])


CASES = {
    "a scalar keeps its comment": (
        "num_processes:   2   # all machines\nmixed_precision: bf16\n",
        [(PROCESSES, 8)],
        "num_processes: 8   # all machines\nmixed_precision: bf16\n",
    ),
    "an empty value is filled in": (
        "num_processes:\nuse_cpu: true\n",
        [(PROCESSES, 8)],
        "num_processes: 8\nuse_cpu: true\n",
    ),
    "a spelled null is replaced": ("num_processes: ~ # x\n", [(PROCESSES, 8)], "num_processes: 8 # x\n"),
    "a missing key of the top level goes below its last key": (
        "# mine\nuse_cpu: true  # c\n\nfsdp_config:\n  version: 2\n",
        [(PROCESSES, 8)],
        "# mine\nuse_cpu: true  # c\nnum_processes: 8\n\nfsdp_config:\n  version: 2\n",
    ),
    "a missing key takes its section's indentation": (
        "fsdp_config:\n    fsdp_version: 2   # v\n    # end\n\nuse_cpu: true\n",
        [(OFFLOAD, True)],
        "fsdp_config:\n    fsdp_version: 2   # v\n    fsdp_offload_params: true\n    # end\n\nuse_cpu: true\n",
    ),
    "a missing section goes to the end": (
        "use_cpu: true\n# last\n",
        [(OFFLOAD, True)],
        "use_cpu: true\n\nfsdp_config:\n  fsdp_offload_params: true\n# last\n",
    ),
    "an empty section is filled": (
        "fsdp_config:  # none\nuse_cpu: true\n",
        [(OFFLOAD, True)],
        "fsdp_config:  # none\n  fsdp_offload_params: true\nuse_cpu: true\n",
    ),
    "no line break at the end": ("use_cpu: true", [(PROCESSES, 8)], "use_cpu: true\nnum_processes: 8\n"),
    "an empty file": ("", [(PROCESSES, 8)], "num_processes: 8\n"),
    "only comments": ("# nothing\n", [(OFFLOAD, True)], "# nothing\nfsdp_config:\n  fsdp_offload_params: true\n"),
    "a list becomes a line": (
        "fsdp_config:\n  fsdp_transformer_layer_cls_to_wrap:\n    - A\n    - B\n  # after\n  fsdp_version: 2\n",
        [(BLOCKS, ("C", "D"))],
        "fsdp_config:\n  fsdp_transformer_layer_cls_to_wrap: C,D\n  # after\n  fsdp_version: 2\n",
    ),
    "a mapping stays on its line": (
        "launch:\n  env: {A: x}\n  max_restarts: 1\n",
        [(ENV, {"A": "no", "B": "1"})],
        "launch:\n  env: {A: 'no', B: '1'}\n  max_restarts: 1\n",
    ),
    "a key is taken out with its line": (
        "# a\nnum_processes: 2  # gone\nuse_cpu: true\n",
        [(PROCESSES, None)],
        "# a\nuse_cpu: true\n",
    ),
    "taking out what is not there changes nothing": (
        "use_cpu: true\n",
        [(PROCESSES, None), (OFFLOAD, None)],
        "use_cpu: true\n",
    ),
    "a flow section": (
        "fsdp_config: {version: 2} # c\n",
        [(OFFLOAD, True)],
        "fsdp_config:\n  version: 2\n  fsdp_offload_params: true\n",
    ),
    "json": (
        '{\n  "num_processes": 2,\n  "mixed_precision": "no"\n}\n',
        [(PROCESSES, 8), (VERSION, 2), (("mixed_precision",), "bf16")],
        '{\n  "num_processes": 8,\n  "mixed_precision": "bf16",\n'  # noqa: ISC004
        '  "fsdp_config": {\n    "fsdp_version": 2\n  }\n}\n',
    ),
    "carriage returns": (
        "use_cpu: true\r\n",
        [(OFFLOAD, True)],
        "use_cpu: true\r\n\r\nfsdp_config:\r\n  fsdp_offload_params: true\r\n",
    ),
    "a byte order mark": ("\ufeffnum_processes: 2\n", [(PROCESSES, 8)], "\ufeffnum_processes: 8\n"),
    "quotes": ("mixed_precision: 'bf16' # q\n", [(("mixed_precision",), "no")], "mixed_precision: 'no' # q\n"),
    "a block text": (
        "checkpoint:\n  dir: >-\n    a\n    b\nuse_cpu: true\n",
        [(("checkpoint", "dir"), "c")],
        "checkpoint:\n  dir: c\nuse_cpu: true\n",
    ),
    "a file of one section": (
        "fsdp_version: 2 # v\n",
        [(OFFLOAD, True)],
        "fsdp_version: 2 # v\nfsdp_offload_params: true\n",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_set_keys(case):
    before, changes, after = CASES[case]
    assert edit(before, *changes) == after
    config = config_of(text=after)
    for path, value in changes:
        assert value_at(config, path) == (keys_by_path()[path].default if value is None else value)


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("num_processes: &n 2\nnum_machines: *n\n", PROCESSES, 8),
        ("num_machines: &n 2\nnum_processes: *n\n", PROCESSES, 8),
        ("base: &b\n  fsdp_version: 2\nfsdp_config: *b\n", OFFLOAD, True),
    ],
)
def test_what_is_shared_through_an_anchor_is_refused(text, path, value):
    with pytest.raises(UsageError, match="anchor"):
        edit(text, (path, value))


def test_text_that_is_not_yaml_is_refused_with_its_place():
    with pytest.raises(ConfigError) as caught:
        edit("a: [1\nb: 2\n", (PROCESSES, 8))
    assert caught.value.problems[0].id == "syntax"


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "fsdp.yaml"
    write_text_atomically(path, "a\r\nb\n")
    assert path.read_bytes() == b"a\r\nb\n"
    with pytest.raises(LaunchError, match="cannot write"):
        write_text_atomically(tmp_path / "missing" / "fsdp.yaml", "x")
    with pytest.raises(LaunchError, match="cannot write"):
        write_text_atomically(tmp_path, "x")
    assert [item.name for item in tmp_path.iterdir()] == ["fsdp.yaml"]
