"""What `fsdplaunch tune` is asked, and how a search that goes on is asked the same again."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsdplaunch.config.load.load import load_config
from fsdplaunch.errors import UsageError
from fsdplaunch.tune.state import TuneState, broken_state

STEPS, LIMIT_SECONDS = 10, 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRequest:
    """What is to be searched; kept with the search, which goes on with it.

    Attributes:
        script: Its path, or a module's name.
        arguments: Its own.
        module: Whether the script is a module.
        file: The configuration; None for the one that a launch would take.
        overrides: `KEY=VALUE` from the command line.
        tries: `KEY=V1,V2` from the command line.
        steps: Measured in a first launch.
        limit_seconds: How long one launch may take.
        memory: Bytes that a rank may need; None for the GPUs' own.
        precision: Whether other dtypes may be tried.
        compile: Whether torch.compile is tried.
        allow_writes: Whether the script may write outside of its folder.
    """

    script: str | None = None
    arguments: tuple[str, ...] = ()
    module: bool = False
    file: str | None = None
    overrides: tuple[str, ...] = ()
    tries: tuple[str, ...] = ()
    steps: int = STEPS
    limit_seconds: float = LIMIT_SECONDS
    memory: int | None = None
    precision: bool = False
    compile: bool = False
    allow_writes: bool = False

    @property
    def path(self) -> Path | None:
        """Return the configuration's file; None for the one that a launch would take."""
        return Path(self.file) if self.file else None

    def log_dir(self) -> Path:
        """Return where the configuration says that runs are."""
        return Path(load_config(self.path, overrides=self.overrides).config.launch.log_dir)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data, with the folder it belongs to."""
        return {**asdict(self), "folder": str(Path.cwd())}


def resumed(state: TuneState, request: TuneRequest) -> TuneRequest:
    """Return what a search was asked.

    Args:
        state: What it has kept.
        request: What is asked now: nothing else but where runs are.

    Raises:
        UsageError: More is asked, the search belongs to another folder, or its file is broken.
    """
    if request != TuneRequest(file=request.file, overrides=request.overrides):
        msg = "--resume goes on with its own script and options"
        raise UsageError(msg, hint="give only --write, --html, --json or --overwrite beside it")
    try:
        kept = {name: state.request[name] for name in TuneRequest.__dataclass_fields__}
        lists = {name: tuple(kept[name]) for name in ("arguments", "overrides", "tries")}
        folder = state.request["folder"]
    except (KeyError, TypeError) as error:
        raise broken_state(state.folder) from error
    if folder != str(Path.cwd()):
        msg = f"the search began in {folder}"
        raise UsageError(msg, hint=f"cd {folder}")
    return TuneRequest(**{**kept, **lists})
