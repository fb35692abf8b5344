"""Ready-made configurations: the files of configs/, from the source tree or from an installed package."""

from dataclasses import dataclass
from pathlib import Path

import fsdplaunch
from fsdplaunch.config.load.key_names import closest
from fsdplaunch.errors import UsageError

_PACKAGE = Path(fsdplaunch.__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One file of configs/.

    Attributes:
        name: The file's name without its ending.
        summary: What its first comment says.
        text: The file.
    """

    name: str
    summary: str
    text: str


def preset_folder() -> Path:
    """Return the folder with the presets: inside the wheel, else beside the package."""
    shipped = _PACKAGE / "_presets"
    return shipped if shipped.is_dir() else _PACKAGE.parent / "configs"


def list_presets() -> tuple[Preset, ...]:
    """Return every preset, by name."""
    return tuple(_read(path) for path in sorted(preset_folder().glob("*.yaml")))


def find_preset(name: str) -> Preset:
    """Return one preset.

    Raises:
        UsageError: There is none of that name.
    """
    presets = {preset.name: preset for preset in list_presets()}
    wanted = name.removesuffix(".yaml").replace("-", "_")
    if wanted in presets:
        return presets[wanted]
    near = closest(wanted, list(presets))
    msg = f"{name} is not a preset"
    raise UsageError(msg, hint=f"did you mean {near[0]}?" if near else f"there are {', '.join(presets)}")


def _read(path: Path) -> Preset:
    text = path.read_text(encoding="utf-8")
    comments = [line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("# ")]
    summary = next((line for line in comments if not line.startswith("yaml-language-server")), "")
    return Preset(name=path.stem, summary=summary, text=text)
