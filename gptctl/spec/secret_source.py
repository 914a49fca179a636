"""References to secrets in configs and profiles. The secret itself is never part of them."""

from __future__ import annotations

from typing import Any

from trainer.config.kinds import WRONG_TYPE, BadValue, Text
from trainer.config.tree import Map, Node, is_null


class SecretSource:
    """Where the node reads a secret: `{file: path}` or `{env: NAME}`.

    The secret itself is never part of a config: configs are copied and printed.
    """

    def read(self, node: Node) -> dict[str, str]:
        given = list(node.items.items()) if isinstance(node, Map) else []
        given = [(kind, value) for kind, value in given if not is_null(value)]
        # One that was written elsewhere later replaces the other: `-o` beats a file.
        if len({value.place.file for _, value in given}) == len(given) > 1:
            given = given[-1:]
        if len(given) == 1 and given[0][0] in ("file", "env"):
            kind, value = given[0]
            # Any path is allowed, but a variable must have a name that a shell accepts.
            pattern = r"[A-Za-z_][A-Za-z0-9_]*" if kind == "env" else ""
            return {kind: Text(pattern, "a variable name").read(value)}
        raise BadValue(
            WRONG_TYPE, "a secret must be a reference", "use {file: path} or {env: NAME}"
        )

    def schema(self) -> dict[str, Any]:
        reference = {"type": "string"}
        return {
            "type": "object",
            "properties": {"file": reference, "env": reference},
            "maxProperties": 1,
        }
