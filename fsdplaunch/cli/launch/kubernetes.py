"""`fsdplaunch launch --kubernetes`: write the objects, show them or apply them with kubectl."""

from pathlib import Path

from fsdplaunch.cli.launch.handoff import make_run_folder, plan_elsewhere, show_sent, snapshot
from fsdplaunch.cli.launch.options import LaunchOptions
from fsdplaunch.cli.output import Output
from fsdplaunch.config.load.load import LoadedConfig
from fsdplaunch.launch.plan import LaunchTarget
from fsdplaunch.launch.run_id import fresh_run_id
from fsdplaunch.launch.runs.registry import write_job
from fsdplaunch.launch.schedulers.kubernetes.kubectl import apply, words_for
from fsdplaunch.launch.schedulers.kubernetes.manifests import (
    CONFIG_FOLDER,
    CONFIG_KEY,
    PROGRAM,
    object_name,
    objects,
)
from fsdplaunch.launch.schedulers.launch_command import LaunchCommand

OBJECTS = "objects.yaml"


def launch_on_kubernetes(
    loaded: LoadedConfig, target: LaunchTarget, launch_options: LaunchOptions, out: Output
) -> int:
    """Apply the run's objects, or print them.

    Raises:
        LaunchError: Something is missing, or the cluster refuses.
    """
    import yaml

    config, run_id = loaded.config, fresh_run_id()
    run_dir = Path(config.launch.log_dir).absolute() / run_id
    order = LaunchCommand(
        target=target, config=f"{CONFIG_FOLDER}/{CONFIG_KEY}", allow_unsharded=launch_options.allow_unsharded
    )
    text = snapshot(config, log_dir=Path(config.launch.log_dir))
    made = objects(config, order.words(PROGRAM), run_id=run_id, snapshot=text)
    sent = yaml.safe_dump_all(made, sort_keys=False, width=10**6)
    argv = words_for(["apply", "-f", "-"], config.kubernetes.namespace)
    plan = plan_elsewhere(loaded, target, run_id=run_id, run_dir=run_dir, argv=argv, sent=sent)
    if launch_options.dry_run or launch_options.check_only:
        show_sent(plan, loaded, sent, as_json=launch_options.as_json, out=out)
        return 0
    said = apply(sent, config.kubernetes.namespace)
    make_run_folder(plan, files={OBJECTS: sent})
    name, kube = object_name(run_id), config.kubernetes
    write_job(run_dir, route="kubernetes", name=name, kind=kube.kind, namespace=kube.namespace)
    if launch_options.as_json and not launch_options.follow:
        out.json({"run_id": run_id, "run_dir": str(run_dir), "route": "kubernetes", "name": name})
    out.say(said)
    follow = f"fsdplaunch runs logs {run_id} --follow"
    out.say(f"run {run_id} is {kube.kind} {name}; {follow}, runs cancel {run_id} deletes it")
    if not launch_options.follow:
        return 0
    from fsdplaunch.cli.launch.runs import follow_run

    return follow_run(run_dir, out)
