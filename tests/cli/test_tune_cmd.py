"""`fsdplaunch tune` refuses what it cannot measure, with one message, before anything is started or written."""

import pytest

SCRIPT = "print('trains')\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "error: no script given"),
        (["nothing.py"], "error: script not found: nothing.py"),
        (["--try", "nonsense=1", "train.py"], "error: --try: nonsense is not a key"),
        (["--try", "fsdp_reshard_after_forward=true", "train.py"], "names nothing that makes another run"),
        (["--memory", "much", "train.py"], "error: --memory must be a size such as 5GB"),
        (["--write", "fsdp.yaml", "train.py"], "error: fsdp.yaml exists"),
        (["--write", "no/where.yaml", "train.py"], "there is no folder"),
        (["--write", "folder", "--overwrite", "train.py"], "error: folder is a folder"),
        (["--set", "num_machines=2", "--set", "main_process_ip=a", "train.py"], "is for 2 nodes, and"),
        (["--set", "distributed_type=MULTI_GPU", "train.py"], "distributed_type MULTI_GPU shards nothing"),
        (["--set", "fsdp_config.xla=true", "train.py"], "torch's FSDP, and this one is PyTorch/XLA's"),
    ],
)  # fmt: skip
def test_wrong_input_is_one_message_and_nothing_is_written(cli, tmp_path, arguments, words):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "folder").mkdir()
    (tmp_path / "fsdp.yaml").write_text("fsdp_config:\n  fsdp_version: 2\n")
    before = sorted(tmp_path.rglob("*"))
    done = cli("tune", *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert sorted(tmp_path.rglob("*")) == before
