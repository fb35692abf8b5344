import pytest

from fsdplaunch.probe.scheduler import Cluster, describe_cluster, read_cluster

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_JOB_NODELIST": "gpu-[01-02]",
    "SLURM_NTASKS": "2",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_PROCID": "1",
}


def test_read_cluster_plain_machine_is_none():
    assert read_cluster({"HOME": "/root", "RANK": "3", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}) == Cluster()
    assert describe_cluster(Cluster()) is None


def test_read_cluster_slurm_job_says_everything():
    found = read_cluster(SLURM | {"PMI_SIZE": "2", "PMI_RANK": "0"})
    assert found == Cluster(
        kind="slurm",
        job_id="4711",
        num_nodes=2,
        node_rank=1,
        gpus_on_node=8,
        node_list="gpu-[01-02]",
        num_tasks=2,
        tasks_on_node=1,
        task=1,
    )
    assert describe_cluster(found) == "SLURM job 4711   2 nodes   8 GPUs on each   (gpu-[01-02])"


@pytest.mark.parametrize(
    ("asked", "expected"),
    [("8", 8), ("h100:8", 8), ("gpu:h100:4", 4), ("a100:4,h100:4", 8), ("h100:8(IDX:0-7)", 8), ("many", None)],
)
def test_read_cluster_slurm_gpus_per_node_as_the_user_wrote_it(asked, expected):
    assert read_cluster({"SLURM_JOB_ID": "1", "SLURM_GPUS_PER_NODE": asked}).gpus_on_node == expected


def test_read_cluster_slurm_salloc_shell_without_step_has_no_node_rank():
    found = read_cluster({"SLURM_JOBID": "9", "SLURM_NNODES": "4"})
    assert (found.job_id, found.num_nodes, found.node_rank, found.gpus_on_node) == ("9", 4, None, None)


def test_read_cluster_torchrun_inside_slurm_is_torchrun():
    found = read_cluster(
        SLURM
        | {
            "TORCHELASTIC_RUN_ID": "run",
            "WORLD_SIZE": "16",
            "LOCAL_WORLD_SIZE": "8",
            "RANK": "9",
            "GROUP_RANK": "1",
            "GROUP_WORLD_SIZE": "2",
        }
    )
    assert (found.kind, found.num_tasks, found.tasks_on_node, found.task) == ("torchelastic", 16, 8, 9)
    assert (found.num_nodes, found.node_rank) == (2, 1)


def test_read_cluster_numbers_that_are_none_are_left_out():
    found = read_cluster({"SLURM_JOB_ID": "1", "SLURM_NNODES": "", "SLURM_NODEID": "x"})
    assert (found.num_nodes, found.node_rank) == (None, None)
