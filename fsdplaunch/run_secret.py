"""The secret of one run: what tells those who belong to it from everybody else. Standard library only.

Node 0 makes it, and whoever starts the other nodes carries it there: in a variable, in a file, over ssh. It is
never an argument of a command, which every user of a machine may read.
"""

import hashlib
import hmac
import os
from collections.abc import Mapping, MutableMapping

SECRET = "FSDPLAUNCH_SECRET"  # noqa: S105  (a variable's name)
"""Contract variable, not a key: the run's secret, in hexadecimal digits."""
STORE_KEY = "FSDPLAUNCH_STORE_KEY"
"""Contract variable, not a key: what the workers' keys in the run's store begin with."""
STORE_FILE = "FSDPLAUNCH_STORE_FILE"
"""Contract variable, not a key: the file that the workers of a lone node meet in."""
PRIVATE_DIR = "FSDPLAUNCH_PRIVATE_DIR"
"""Contract variable, not a key: the folder (0700) with such files; the agent's, and gone with it."""
_BYTES = 32


def make_secret() -> str:
    """Return a new secret: 32 random bytes in hexadecimal digits."""
    return os.urandom(_BYTES).hex()


def is_secret(text: str) -> bool:
    """Return whether a text can be a secret: 32 hexadecimal digits or more, as `openssl rand -hex 32` prints."""
    return len(text) >= _BYTES and all(letter in "0123456789abcdefABCDEF" for letter in text)


def proof(secret: str, *words: str) -> str:
    """Return what only those who know the secret can say about these words, in hexadecimal digits."""
    return hmac.new(secret.encode(), "\0".join(words).encode(), hashlib.sha256).hexdigest()


def is_proof(text: str, secret: str, *words: str) -> bool:
    """Return whether a text is what `proof` says, in a time that does not depend on where they differ."""
    return hmac.compare_digest(text.encode(errors="replace"), proof(secret, *words).encode())


def leave_outer_run(environ: MutableMapping[str, str]) -> None:
    """Remove what a launch inside another run's worker has inherited of that run's store."""
    for name in (STORE_KEY, STORE_FILE, PRIVATE_DIR):
        environ.pop(name, None)


def worker_store(environ: Mapping[str, str], attempt: int, secret: str) -> dict[str, str]:
    """Return the variables by which the workers of one attempt find each other, and nobody else finds them."""
    if folder := environ.get(PRIVATE_DIR):
        return {STORE_FILE: os.path.join(folder, f"attempt{attempt}")}  # noqa: PTH118  (a text among texts)
    return {STORE_KEY: proof(secret, "workers")} if secret else {}
