"""Signatures of checkpoints: an HMAC-SHA256 with a key that only the user's jobs have.

Checksums detect damage. A signature also shows that somebody with the key wrote the checkpoint. The
key comes from the environment, and is in no file and no message of this program.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping, Sequence

from trainer.errors import UserError

VARIABLE = "GPTCTL_CHECKPOINT_KEY"
SHORTEST = 32  # characters of a key: a shorter one might be guessed
SIGNATURE_HINT = (
    "add the key that signed it as another line of the key file; "
    f"to load unsigned ones, unset {VARIABLE}"
)
_MAKE_KEY = "create one with: openssl rand -hex 32"


class Keys:
    """The keys of this run, or none. The first one signs; all of them are accepted."""

    def __init__(self, keys: Sequence[bytes] = ()) -> None:
        self._keys = tuple(keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def signature(self, kind: str, text: bytes) -> str:
        """The signature of a text. `kind` keeps it from being used for another kind of text."""
        return _hmac(self._keys[0], kind, text)

    def objection(self, signature: object, kind: str, text: bytes) -> str:
        """Why something with this signature must not be loaded, or an empty string."""
        if not self._keys:
            return ""
        if not isinstance(signature, str) or not signature.isascii():
            return f"it is not signed, but {VARIABLE} is set"
        # All keys, in constant time: the time must not tell how much of a signature is right.
        matches = [hmac.compare_digest(signature, _hmac(key, kind, text)) for key in self._keys]
        return "" if any(matches) else f"its signature does not match {VARIABLE}"


def current_keys(environ: Mapping[str, str] = os.environ) -> Keys:
    """The keys in the environment, one per line. Raises UserError if one of them is too short."""
    if VARIABLE not in environ:
        return Keys()
    keys = [line.strip() for line in environ[VARIABLE].splitlines() if line.strip()]
    if not keys:
        raise UserError(f"{VARIABLE} is set, but empty", _MAKE_KEY)
    for number, key in enumerate(keys, 1):
        if len(key) < SHORTEST:  # its length, never its text: this message goes to the log
            raise UserError(
                f"{VARIABLE}: key {number} is too short: {len(key)} of {SHORTEST} characters",
                _MAKE_KEY,
            )
    return Keys([os.fsencode(key) for key in keys])


def is_about_signature(reason: str) -> bool:
    """Whether something was refused for its signature: `Keys.objection` names the variable."""
    return VARIABLE in reason


def _hmac(key: bytes, kind: str, text: bytes) -> str:
    return hmac.new(key, f"gptctl {kind}\n".encode() + text, hashlib.sha256).hexdigest()
