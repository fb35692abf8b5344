"""Which variables hold secrets, by their names and by what services' keys look like, and how they are kept unseen.

The secrets among launch.env travel apart from the configuration, and no file keeps them.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from fsdplaunch.config.schema.config import Config

HIDDEN = "***"
TELLING = (
    "TOKEN(?!IZ)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|PRIVATE|AUTH(?!OR)|API_?KEY|ACCESS_KEY"
    "|(?<![A-Z0-9])KEYS?(?![A-Z0-9])"
)
"""What the name of a secret contains, in a regular expression for any case."""
SECRET_VALUE = re.compile(
    r"\b(hf_[A-Za-z0-9]{8,}|gh[pousr]_[A-Za-z0-9]{8,}|github_pat_\w{8,}|sk-[A-Za-z0-9-]{8,}|AKIA[0-9A-Z]{12,}"
    r"|xox[abps]-[\w-]{8,}|eyJ[\w-]{10,}\.[\w-]+\.[\w-]*)"
)
IN_URL = re.compile(r"(?<=://)[^/\s:@]+(:[^/\s@]*)?@")
"""A user, perhaps with a password, in an address."""
_NAME = re.compile(TELLING, re.IGNORECASE)
_KEY = "launch.env"


def is_secret(name: str, value: str = "") -> bool:
    """Return whether a variable looks like one that nobody else is to read."""
    return bool(_NAME.search(name) or SECRET_VALUE.search(value) or IN_URL.search(value))


def without_secrets(config: Config) -> tuple[Config, dict[str, str]]:
    """Return a configuration without the secrets in launch.env, and these."""
    variables = config.launch.env
    secrets = {name: value for name, value in variables.items() if is_secret(name, value)}
    shown = {name: value for name, value in variables.items() if name not in secrets}
    return replace(config, launch=replace(config.launch, env=shown)), secrets


def without_secret_overrides(overrides: Sequence[str], config: Config) -> tuple[list[str], dict[str, str]]:
    """Return a command line's overrides without the secrets in launch.env, and these; `config` came of them."""
    shown: list[str] = []
    secrets: dict[str, str] = {}
    for one in overrides:
        key, _, value = one.partition("=")
        name = key.strip().removeprefix(f"{_KEY}.")
        if key.strip() == _KEY:
            left, found = without_secrets(config)
            secrets |= found
            open_ones = left.launch.env.items()
            shown += [f"{_KEY}.{name}={text}" for name, text in open_ones] if found else [one]
        elif name != key.strip() and is_secret(name, value):
            secrets[name] = value
        else:
            shown.append(one)
    return shown, secrets
