"""`fsdplaunch launch --kubernetes`: write the objects, show them or apply them with kubectl."""

from dataclasses import replace
from pathlib import Path

from fsdplaunch.cli.launch.handoff import Handoff, snapshot
from fsdplaunch.cli.launch.options import LaunchRequest
from fsdplaunch.cli.output import Output

OBJECTS = "objects.yaml"


def launch_on_kubernetes(request: LaunchRequest, out: Output) -> int:
    """Apply the run's objects, or print them.

    Raises:
        LaunchError: Something is missing, or the cluster refuses.
    """
    import yaml

    from fsdplaunch.launch.schedulers import kubernetes

    config, kube, handoff = request.config, request.config.kubernetes, Handoff(request, out)
    run_id, name = handoff.run_id, kubernetes.object_name(handoff.run_id)
    text = snapshot(config, log_dir=Path(config.launch.log_dir))
    words = request.words(kubernetes.PROGRAM, f"{kubernetes.CONFIG_FOLDER}/{kubernetes.CONFIG_KEY}")
    made = kubernetes.objects(config, words, run_id=run_id, snapshot=text, secrets=handoff.secrets())
    sent = yaml.safe_dump_all(made, sort_keys=False, width=10**6)
    plan = handoff.plan(kubernetes.words_for(["apply", "-f", "-"], kube.namespace), sent=sent)
    if handoff.is_only_shown(plan):
        return 0
    out.say(kubernetes.apply(sent, kube.namespace))
    open_to_all = [one for one in made if one["kind"] != "Secret"]
    kept = yaml.safe_dump_all(open_to_all, sort_keys=False, width=10**6)
    handoff.write_folder(replace(plan, sent=kept), {OBJECTS: kept})
    follow = f"fsdplaunch runs logs {run_id} --follow"
    sentence = f"run {run_id} is {kube.kind} {name}; {follow}, runs cancel {run_id} deletes it"
    shown = {"name": name}
    return handoff.submitted(sentence, route="kubernetes", shown=shown, kind=kube.kind, namespace=kube.namespace)
