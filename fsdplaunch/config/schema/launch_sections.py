"""Sections about a run: how workers start and save, and what a cluster is asked for. Part of the one schema."""

from dataclasses import dataclass
from typing import Any

from fsdplaunch.config.schema import key
from fsdplaunch.config.schema import kinds as v


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSection:
    """How workers are started. A section of our own; accelerate has no such keys in its file."""

    workers_per_node: v.LocalWorkers | None = key(
        v.LOCAL_WORKERS,
        None,
        aliases=("nproc_per_node",),
        question="How many workers on each node?",
        per_node=True,
        follows=("num_processes",),
    )("""
        Worker processes per node: a number; auto for one per GPU (2 without GPUs); gpu for one per GPU, an error
        without; cpu for one per processor. Left out, num_processes divided by num_machines.""")
    nodes: str | None = key(v.NODE_RANGE, None, follows=("num_machines",))("""
        MIN:MAX nodes for an elastic run, which starts with MIN and accepts more, up to MAX. When nodes come or go,
        all workers restart from the last checkpoint. Left out, exactly num_machines.""")
    shard: v.ShardName = key(v.one_of(v.ShardName), "auto")("""
        Who shards the model. auto: the script's own calls, or if none of them shards, each worker, when the script
        moves its model to the device, compiles it, builds its optimizer or gives it to DistributedDataParallel
        (FSDP2). always: each worker, whatever else the script calls. explicit: only the script's own calls. off:
        nobody, and a script that shards nothing is not an error.""")
    hide_ranks: bool = key(v.FLAG, False)("""
        Hide RANK, LOCAL_RANK, WORLD_SIZE and the like from the script. A script that looks at them then takes its
        branch for one process, and is sharded and given its share of the data like any one-process script.""")
    keep_global_batch: bool = key(v.FLAG, False)("""
        In a script that the workers shard, compute what one process would: every worker runs the script on the
        global batch, with the same random numbers, and only the model's passes are divided over them. Otherwise
        every worker takes its own batches and its own random numbers, as under DDP.""")
    max_restarts: int = key(v.WHOLE, 0)("How often all workers are restarted after one of them has failed.")
    monitor_interval_seconds: float = key(v.SECONDS, 0.1, aliases=("monitor_interval",))("""
        Time between two checks of the workers.""")
    role: str = key(v.TEXT, "default")("Name of the workers' role, which scripts see as ROLE_NAME.")
    event_log: v.EventLogName | None = key(v.one_of(v.EventLogName), None, aliases=("event_log_handler",))("""
        console: torch's agent writes its events into the run's agent.log. Left out, nowhere.""")
    rendezvous_endpoint: str | None = key(
        v.ENDPOINT,
        None,
        aliases=("rdzv_endpoint",),
        per_node=True,
        follows=("main_process_ip", "main_process_port"),
    )("HOST:PORT where the nodes meet. Left out on one node, a free local port.")
    rendezvous_id: str | None = key(v.TEXT, None, aliases=("rdzv_id",))("""
        Name under which the nodes of one run find each other. Left out, the run's own name.""")
    rendezvous_options: dict[str, str] = key(v.SETTINGS, {}, aliases=("rdzv_conf",))("""
        Further settings of torch's rendezvous, for example read_timeout=30,last_call_timeout=5. Where the
        launchers number the nodes themselves, most have no effect; notes name those.""")
    local_address: str | None = key(v.TEXT, None, aliases=("local_addr",), per_node=True)("""
        This node's address, as the other nodes reach it.""")
    network_interface: str | None = key(v.TEXT, None, per_node=True)("""
        Interface the nodes talk over, for example eth0: gives this node's address and sets GLOO_SOCKET_IFNAME and
        NCCL_SOCKET_IFNAME. Left out, gloo uses the interface towards node 0, and NCCL chooses.""")
    rendezvous_timeout_seconds: float = key(v.SECONDS, 300.0)("""
        How long to wait for the other nodes before giving up.""")
    machine_timeout_seconds: float = key(v.SECONDS, 10.0)("""
        How long a node may be silent before it counts as lost.""")
    process_group_timeout_seconds: float = key(v.SECONDS, 600.0)("""
        How long a collective may wait for the slowest rank before the run fails.""")
    log_dir: str = key(v.TEXT, "runs", per_node=True)("""
        Folder with one subfolder per run, which holds the plan, the result and the ranks' output.""")
    show_ranks: str = key(v.RANKS, "0")("""
        Ranks whose output reaches the terminal: all, or numbers separated by commas. Every other rank's output
        goes to its files in the run's folder.""")
    show_local_ranks: str | None = key(
        v.RANKS, None, aliases=("local_ranks_filter",), per_node=True, follows=("launch.show_ranks",)
    )("Ranks whose output reaches this node's terminal, counted on each node. Overrides show_ranks.")
    redirects: str | None = key(v.STREAMS, None, follows=("launch.show_ranks",))("""
        Output that goes to the files only, as torchrun's option says it: 1 stdout, 2 stderr, 3 both, for all
        workers of a node or for some, `0:3,1:2`. Overrides show_ranks.""")
    tee: str | None = key(v.STREAMS, None, follows=("launch.show_ranks",))("""
        Output that reaches the terminal as well as the files, written as in redirects. Overrides show_ranks.""")
    preload: tuple[str, ...] = key(v.MODULES, ("torch",))("""
        Modules imported once per node, before the workers are forked. Torch is among them unless the list is
        empty; an empty list starts every worker as a fresh Python.""")
    keep_warm_seconds: float = key(v.WAIT, 0.0, aliases=("keep_warm",), per_node=True)("""
        How long the interpreter that has imported torch and the modules of preload is kept after a run. The user's
        next launch that matches it forks its agent and its workers from it. 0: it ends with the run.""")
    numa_binding: v.NumaName | None = key(v.one_of(v.NumaName), None, follows=("enable_cpu_affinity",))("""
        Bind each worker to CPUs near its GPU: all of its NUMA node (node), or its share of that node's cores
        (exclusive). Left out, the system decides.""")
    virtual_local_rank: bool = key(v.FLAG, False)("""
        Show each worker only its own GPU, as number 0, and give all of them LOCAL_RANK 0.""")
    signals: tuple[str, ...] = key(
        v.SIGNALS, ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"), aliases=("signals_to_handle",)
    )("""
        Signals to the launcher that are passed on to the workers. After SIGUSR1 and SIGUSR2 the run may go on;
        after the others it ends.""")
    shutdown_grace_seconds: float = key(v.WAIT, 30.0, aliases=("shutdown_timeout",))("""
        How long workers may take to save and end after a signal, or after another worker failed, before they are
        killed.""")
    stall_seconds: float = key(v.WAIT, 600.0)("""
        When no rank has made a step or written anything for this long, name the ranks that are behind and save
        every rank's stack. 0: never.""")
    measure: bool = key(v.FLAG, True)("""
        Measure each worker's steps: how long they take, and how much of that is waiting for data and for other
        workers. With false steps are only counted.""")
    timing: bool = key(v.FLAG, False)("""
        Print after the run how long each part of its start took: the plan, the agent, importing torch, forking,
        joining the process group, hooks, reading the script.""")
    metrics: dict[str, str] = key(v.METRICS, {})("""
        Where else the measurements go, for other tools. jsonl: FILE gets a line of JSON for each step,
        tensorboard: FOLDER the same as scalars (with tensorboard installed), and prometheus: PORT serves the last
        steps at http://127.0.0.1:PORT/metrics. The agent of rank 0 writes them.""")
    env: dict[str, str] = key(v.VARIABLES, {})("Further environment variables for the workers, name: value.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionSection:
    """Dtypes, each on its own. Left out, mixed_precision decides."""

    param: v.DtypeName | None = key(v.DTYPE, None, follows=("mixed_precision",))("""
        Dtype that parameters are gathered and computed in. Left out, that of mixed_precision.""")
    reduce: v.DtypeName | None = key(v.DTYPE, None)("""
        Dtype that gradients are summed over ranks in. Left out, fp32 whenever parameters compute in less.""")
    output: v.DtypeName | None = key(v.DTYPE, None, versions=(2,))("""
        Dtype that the model's outputs are cast to (FSDP2). Left out, that of the computation.""")
    buffer: v.DtypeName | None = key(v.DTYPE, None, versions=(1,), follows=("mixed_precision",))("""
        Dtype of buffers in forward (FSDP1). Left out, that of mixed_precision.""")
    master: v.DtypeName | None = key(v.DTYPE, None)("""
        Dtype that the shards and the optimizer state are kept in. Left out, fp32 under mixed precision, else the
        model's own.""")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSection:
    """Where and how checkpoints are written."""

    dir: str = key(v.TEXT, "checkpoints")("""
        Folder that save_checkpoint and load_checkpoint use when the script names none.""")
    weights: str | None = key(v.TEXT, None)("""
        Folder of pretrained weights (safetensors, or pytorch_model.bin), or one file of them. prepare reads them
        into the model, every rank its own shards only; build the model on the meta device and no rank ever holds
        all of it. Left out, the model keeps the weights the script gave it.""")
    weights_strict: bool = key(v.FLAG, True)("""
        Whether tensors that are missing or left over in checkpoint.weights are errors. With false the model
        initialises the missing ones, and those left over are ignored; both are reported.""")
    async_: bool = key(v.FLAG, False)("""
        Copy and write checkpoints in the background: save_checkpoint returns at once, and an optimizer's step that
        comes before the end of the copy to host memory waits for it. Each worker needs memory for a second copy of
        its shards.""")
    keep_last: int | None = key(v.COUNT, None)("""
        How many complete checkpoints with a step are kept; older ones are deleted. Left out, all.""")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSection:
    """What a job that `launch --slurm` submits asks for. Keys with sbatch's names are sbatch's options."""

    partition: str | None = key(v.TEXT, None)("Partition to run in.")
    account: str | None = key(v.TEXT, None)("Account that is charged.")
    qos: str | None = key(v.TEXT, None)("Quality of service.")
    time: str | None = key(v.TEXT, None)("Time limit, for example 12:00:00.")
    gpus_per_node: str | None = key(v.TEXT, None)("GPUs on each node: a number, or type:number.")
    cpus_per_task: int | None = key(v.COUNT, None)("CPUs on each node.")
    mem: str | None = key(v.TEXT, None)("Host memory on each node, for example 200G.")
    constraint: str | None = key(v.TEXT, None)("Features the nodes must have.")
    array: str | None = key(v.TEXT, None)("""
        Submit one job for each number, which it finds in SLURM_ARRAY_TASK_ID, for example 0-3 or 0-9%2.""")
    signal_seconds: int = key(v.WHOLE, 120)("""
        How long before the time limit the workers get SIGTERM, in order to save. SLURM may send it up to a minute
        early. 0: never.""")
    requeue: bool = key(v.FLAG, True)("""
        Put the job back into the queue when its workers have saved and left (status 75), when it is preempted, and
        when a node fails.""")
    container_image: str | None = key(v.TEXT, None)("""
        Container image the workers run in, given to srun (Pyxis); python3 is then the image's.""")
    container_mounts: tuple[str, ...] = key(v.LINES, ())("Mounts of that container, as host:container.")
    modules: tuple[str, ...] = key(v.LINES, ())("Environment modules to load first.")
    setup: tuple[str, ...] = key(v.LINES, ())("Lines of shell that run on the first node before the workers.")
    lines: tuple[str, ...] = key(v.LINES, ())("Further #SBATCH lines, without the #SBATCH.")


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesSection:
    """What the Kubernetes objects say that `launch --kubernetes` applies."""

    image: str | None = key(v.TEXT, None)("Container image with fsdplaunch and the script.")
    namespace: str | None = key(v.TEXT, None)("Namespace of the objects. Left out, that of kubectl's context.")
    working_dir: str | None = key(v.TEXT, None)("Folder in the image to start in. Left out, the image's own.")
    resources: dict[str, Any] = key(v.TABLE, {})("""
        Requests and limits of each pod, as in a pod: {limits: {nvidia.com/gpu: 8}}.""")
    volumes: dict[str, Any] = key(v.TABLE, {})("""
        Where to mount which claim: {/data: my-claim}; or a whole volume source as in a pod.""")
    shm_size: str | None = key(v.TEXT, None)("""
        Limit of /dev/shm, which holds data loaders' batches: 64Gi. Left out, the pod's memory.""")
    secrets: tuple[str, ...] = key(v.LINES, ())("Secrets whose entries become environment variables.")
    pull_secrets: tuple[str, ...] = key(v.LINES, ())("Secrets to pull the image with.")
    service_account: str | None = key(v.TEXT, None)("Service account of the pods.")
    node_selector: dict[str, Any] = key(v.TABLE, {})("Labels the nodes must have.")
    user: int | None = key(v.COUNT, None)("""
        User number the pods run as, and group of their files. Left out, the image's, which must not be root.""")
    retries: int = key(v.WHOLE, 3)("""
        How often a pod may fail in a way that a restart can fix. Evictions do not count.""")


@dataclass(frozen=True, slots=True, kw_only=True)
class SshSection:
    """Nodes that are reached over ssh. Naming some makes launch start there."""

    hosts: tuple[str, ...] = key(v.HOSTS, (), per_node=True)("Nodes, as ssh knows them, node 0 first.")
    hostfile: str | None = key(v.TEXT, None, per_node=True)("""
        File with one node per line, slots=N for its number of workers allowed.""")
    options: tuple[str, ...] = key(v.LINES, ())("""
        Further options of the ssh command, each one word: -F, my_config, -oPort=2222.""")
    python: str | None = key(v.TEXT, None)("""
        Full path of the interpreter on the nodes. Left out, that of this command.""")
    remote_dir: str | None = key(v.TEXT, None)("Folder on the nodes. Left out, the one of this command.")
