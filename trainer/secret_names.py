"""Names of variables and flags whose values are probably secrets. Standard library only."""

from __future__ import annotations

import re

# `--eos-token` is a word of the model, TOKEN_FILE the name of a file: neither is a secret.
_SECRET = re.compile(
    r"(?i)(?!.*(bos|eos|pad|unk|sep|cls|mask|end|stop|special|image|new|per)[-_]token$)"
    r".*(token|secret|password|passwd|passphrase|api[-_]?key|(access|secret|private)[-_]key([-_]id)?"
    r"|credentials?)"
)


def looks_secret(name: str) -> bool:
    """Whether the value of a variable or flag of this name is probably a secret."""
    return bool(_SECRET.fullmatch(name))
