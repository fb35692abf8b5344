"""Without a GPU, workers of a MULTI_GPU file are one process group, or are told so; never independent copies."""

import json

FILE = "distributed_type: MULTI_GPU\nnum_processes: 2\nuse_cpu: false\n"

ACCELERATE = """
import json, torch
from accelerate import Accelerator, PartialState
PartialState()
accelerator = Accelerator()
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.full((1, 2), float(accelerator.process_index))).sum())
optimizer.step()
weights = accelerator.gather(model.module.weight.detach())
if accelerator.is_main_process:
    print(json.dumps([accelerator.num_processes, str(accelerator.distributed_type), weights.tolist()]))
"""

ALONE = """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
torch.save(model.state_dict(), "model.pt")
"""


def test_workers_of_accelerate_train_one_model_together(launch, tmp_path):
    (tmp_path / "fsdp.yaml").write_text(FILE)
    run = launch(ACCELERATE, "--set", "launch.preload=accelerate", plain=False)
    assert run.code == 0, run.stderr
    workers, kind, weights = json.loads(run.stdout.splitlines()[-1])
    assert (workers, kind) == (2, "DistributedType.MULTI_CPU")
    assert weights[0] == weights[1]


def test_script_that_does_not_distribute_itself_is_told_at_its_first_step(launch, tmp_path):
    (tmp_path / "fsdp.yaml").write_text(FILE)
    run = launch(ALONE, plain=False)
    assert run.code == 1
    assert "t.py:6 trains alone: each of the 2 workers has a model of its own, in no process group" in run.stderr
    assert not (tmp_path / "model.pt").exists()
    run = launch(None, "--allow-unsharded", arguments=("t.py",), plain=False)
    assert run.code == 0, run.stderr
