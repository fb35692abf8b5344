"""What a run was: command, configuration, versions, speed, end; of one run, and of two where they differ."""

import json
import shlex
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fsdplaunch.cli.output import Output
from fsdplaunch.cli.runs import folder_of
from fsdplaunch.config.layers import file_layer
from fsdplaunch.config.load import read_file
from fsdplaunch.config.schema.config import all_keys
from fsdplaunch.config.yaml_text import flow_text, plain_value
from fsdplaunch.display_text import counted, listed, one_line, size_words, table
from fsdplaunch.files import matches
from fsdplaunch.launch.runs import Run, find_run
from fsdplaunch.launch.secret_variables import hide_in_text, hide_in_words
from fsdplaunch.launch.step_summary import bound_words, speed_words, waiting_words
from fsdplaunch.run_dir import CHECKPOINTS, CONFIG, JOB, PLAN, RESULT, REVISION, rank_folder, read_json, read_tail
from fsdplaunch.watch import RunWatcher, Snapshot
from fsdplaunch.watch.report import page
from fsdplaunch.watch.view import state_words

_NAMED, _MOST = 8, 1000


def show(
    run: str, *, html: Path | None, file: Path | None, log_dir: Path | None, as_json: bool, out: Output
) -> int:
    """Say what a run was; with `html`, write a page of it instead."""
    found = describe(find_run(folder_of(file, log_dir), run))
    if html is not None:
        html.write_text(page(found.look, found.facts, found.keys), encoding="utf-8")
        out.say(f"wrote {html}")
    elif as_json:
        out.json(found.data)
    else:
        keys = [(f"  {key}: {value}", f"# {place}") for key, value, place in found.keys]
        title = ["", "configuration, where it is not the default:"] if keys else []
        out.data("\n".join([*table(list(found.facts.items())), *title, *table(keys)]))
    return 0


def compare(
    first: str, second: str, *, file: Path | None, log_dir: Path | None, as_json: bool, out: Output
) -> int:
    """Say where two runs differ: what ran, how it was configured, how fast it was."""
    found = [describe(find_run(folder_of(file, log_dir), name)) for name in (first, second)]
    texts = [{**one.facts, **{key: value for key, value, _ in one.keys}} for one in found]
    names = [name for name in dict.fromkeys([*texts[0], *texts[1]]) if name != "started"]
    rows = [(name, *(text.get(name, "-") for text in texts)) for name in names]
    rows = [row for row in rows if row[1] != row[2]]
    if as_json:
        out.json({"runs": [one.data for one in found], "differs": rows})
        return 0
    lines = table(rows)
    if max(map(len, lines), default=0) > shutil.get_terminal_size().columns:
        lines = [line for name, one, other in rows for line in (name, f"  {one}", f"  {other}")]
    out.data("\n".join(lines))
    return 0


class Description(NamedTuple):
    """What a run was, without secrets."""

    look: Snapshot  # its last steps
    data: Mapping[str, Any]  # all of it
    facts: Mapping[str, str]  # what people read of it, in words
    keys: list[tuple[str, str, str]]  # of its configuration that are not defaults: name, value, where it was set


def describe(run: Run) -> Description:
    """Read what a run was out of its folder."""
    look, plan, job = RunWatcher(run).look(), read_json(run.dir / PLAN), read_json(run.part / JOB)
    result = read_json(run.part / RESULT)
    words = plan["arguments"] if matches(plan.get("arguments"), [str]) else []
    nodes = [one for one in (job.get("nodes"), [job.get("host")]) if one and matches(one, [str])]
    said = {
        **look.to_dict(),
        "versions": job["versions"] if matches(job.get("versions"), {"*": object}) else {},
        "revision": "".join(read_tail(run.part / REVISION, 1)),
        "nodes": nodes[0] if nodes else [],
        "config": _config(run, plan),
        "result": {name: result.get(name) for name in ("exit_code", "stopped_by", "notes")},
        "failure": result["failure"] if isinstance(result.get("failure"), dict) else {},
        "checkpoints": read_tail(rank_folder(run.part, 0) / CHECKPOINTS, _MOST),
    }
    data = json.loads(hide_in_text(json.dumps(said)))
    data["command"] = hide_in_words([run.script, *words])
    failure, peak = data["failure"], max((row.peak_bytes or 0 for row in look.summary.ranks), default=0)
    facts = {
        "run": str(run.dir),
        "state": state_words(look),
        "started": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.started)),
        "command": shlex.join(data["command"]),
        "made with": ", ".join(f"{name} {version}" for name, version in data["versions"].items()),
        "revision": data["revision"],
        "workers": counted(run.workers, "worker") if run.workers else "",
        "nodes": listed(data["nodes"], _NAMED),
        "steps": ", ".join([*speed_words(look.summary), *waiting_words(look.summary)]),
        "memory": f"up to {size_words(peak)} on a rank" if peak else "",
        "bound": bound_words(look.summary) if look.summary.bound_by else "",
        "failure": f"rank {failure['rank']}: {failure.get('message')}" if failure.get("rank") is not None else "",
        "why": str(failure.get("why") or ""),
        "checkpoints": listed(data["checkpoints"][::-1], _NAMED),
    }
    keys = [(key, one_line(flow_text(one["value"])), one_line(one["from"])) for key, one in data["config"].items()]
    shown = {name: one_line(text) for name, text in facts.items() if text}
    return Description(look=look, data=data, facts=shown, keys=keys)


def _config(run: Run, plan: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the keys that are not their defaults; one that nobody set follows from others or the machine."""
    places = plan["origins"] if matches(plan.get("origins"), {"*": str}) else {}
    values = file_layer(read_file(run.part / CONFIG, Path())).values
    found = {}
    for spec in all_keys():
        if spec.path in values and (value := values[spec.path].value) != spec.default:
            found[spec.dotted] = {"value": plain_value(spec, value), "from": places.get(spec.dotted, "follows")}
    return found
