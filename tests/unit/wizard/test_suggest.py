from fsdplaunch.display_text import GIB
from fsdplaunch.probe.hardware import Gpu, Hardware
from fsdplaunch.probe.scheduler import Cluster
from fsdplaunch.wizard.state import SuggestionFacts, named_model, suggest_for

LLAMA_8B = named_model("8b")
ONE_H100 = Gpu(index=0, name="H100", memory_bytes=80 * GIB, compute_capability=(9, 0))


def suggest(hardware, cluster, model=None):
    return suggest_for(SuggestionFacts(hardware=hardware, cluster=cluster, model=model))


def test_suggest_model_too_big_for_the_gpu_is_offloaded_and_host_memory_is_checked():
    machine = Hardware(gpus=(ONE_H100,), cpu_count=8, memory_bytes=64 * GIB)
    found = suggest(machine, Cluster(), LLAMA_8B)
    assert found.config.fsdp_config.fsdp_offload_params
    assert "fsdp_config.fsdp_offload_params" in found.reasons
    assert "offloading needs 119 GiB of host memory here, there are 64" in found.notes
    small = Gpu(index=0, name="T4", memory_bytes=2 * GIB, compute_capability=(7, 5))
    notes = suggest(Hardware(gpus=(small,), cpu_count=8), Cluster(), LLAMA_8B).notes
    assert any(note.startswith("even offloaded, ") and "of 2 GiB per GPU" in note for note in notes)


def test_suggest_copies_that_fill_host_memory_are_loaded_once(machines):
    found = suggest(machines["small_container"].hardware, Cluster(), LLAMA_8B)
    assert found.config.fsdp_config.fsdp_cpu_ram_efficient_loading
    assert "memory" in found.reasons["fsdp_config.fsdp_cpu_ram_efficient_loading"]


def test_suggest_fewer_gpus_seen_than_given_is_noted():
    machine = Hardware(gpus=(ONE_H100,), notes=("CUDA_VISIBLE_DEVICES=0 shows 1 of this machine's 8 GPUs",))
    found = suggest(machine, Cluster(kind="slurm", job_id="1", num_nodes=1, gpus_on_node=8))
    assert "the scheduler gave 8 GPUs to this node, 1 are visible" in found.notes
    # A batch script on a head node without GPUs: the scheduler's number is what the nodes have.
    config = suggest(Hardware(cpu_count=4), Cluster(kind="slurm", job_id="1", num_nodes=2, gpus_on_node=4)).config
    assert (config.num_machines, config.num_processes, config.use_cpu) == (2, 8, False)
