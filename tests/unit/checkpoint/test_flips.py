"""One damaged byte anywhere: the merge gives the right result or a clear error, and verified never a wrong one."""

import random

import pytest

from fsdplaunch.checkpoint.merge import MergeOptions, merge
from fsdplaunch.errors import CheckpointError

FLIPS_PER_SEED = 50


def checkpoint_to_spoil(dcp):
    draft = dcp.Draft().add("layers.0.weight", (6, 5), [((0, 0), (3, 5)), ((3, 0), (3, 5))])
    draft.add("layers.1.weight", (4, 6), [((0, 0), (4, 3)), ((0, 3), (4, 3))], dtype="bfloat16")
    draft.add("layers.0.bias", (6,), [((0,), (3,)), ((3,), (3,))]).add("count", (), dtype="int64")
    draft.add("twin", (6,), [((0,), (3,)), ((3,), (3,))])
    return draft.add_value("step")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("verify", [True, False])
def test_flipped_byte_gives_the_right_result_or_a_clear_error(dcp, seed, verify, tmp_path):
    draft = checkpoint_to_spoil(dcp)
    folder = draft.save(tmp_path / "ckpt")
    files = dcp.tree(folder)
    chance = random.Random(seed)
    refused = 0
    for number in range(FLIPS_PER_SEED):
        name = chance.choice(sorted(files))
        place = chance.randrange(len(files[name]))
        spoilt = bytearray(files[name])
        spoilt[place] ^= 1 << chance.randrange(8) if chance.random() < 0.7 else chance.randrange(1, 256)
        (folder / name).write_bytes(spoilt)
        out = tmp_path / f"out{number}"
        try:
            merge(folder, out, options=MergeOptions(verify=verify))
        except CheckpointError:
            refused += 1
            assert not out.exists()
        else:
            found = {n: data for n, (_, _, data) in dcp.safetensors(out / "model.safetensors").items()}
            if verify or name == ".metadata":
                assert found == draft.expected, (name, place)
            assert sorted(found) == sorted(draft.expected), (name, place)
        (folder / name).write_bytes(files[name])
    assert 0 < refused < FLIPS_PER_SEED
