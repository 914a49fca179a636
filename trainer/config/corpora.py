"""The value of `input_dir`: one path, or a blend, which is a mapping from paths to weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Union

from trainer.config.kinds import (
    OUT_OF_RANGE,
    WRONG_TYPE,
    BadItems,
    BadValue,
    FilePath,
    Number,
    key,
)
from trainer.config.tree import Map, Node, Scalar

InputDir = Union[str, Mapping[str, float]]  # noqa: UP007 (evaluated when the section is built)
MAX_CORPORA = 1000
_HEAVIEST = 1e9


class Corpora:
    def read(self, node: Node) -> InputDir:
        if not isinstance(node, Map):
            if not isinstance(node, Scalar):
                hint = "write one path, or {path: weight, …} for a blend"
                raise BadValue(WRONG_TYPE, "expected a path, found a list", hint)
            return FilePath().read(node)
        if not 0 < len(node.items) <= MAX_CORPORA:
            message = f"a blend of {len(node.items)} corpora"
            raise BadValue(OUT_OF_RANGE, message, f"use 1 to {MAX_CORPORA}")
        weights, faults = {}, []
        for path, item in node.items.items():
            try:
                name = FilePath().read(Scalar(path, item.place, True))
                weights[name] = Number(above=0, high=_HEAVIEST).read(item)
            except BadValue as bad:
                faults.append(bad.of(item, path))
        if faults:
            raise BadItems(faults, weights or "./data")
        return weights

    def schema(self) -> dict[str, Any]:
        weight = {"type": "number", "exclusiveMinimum": 0, "maximum": _HEAVIEST}
        return {"type": ["string", "object", "null"], "additionalProperties": weight}


def corpora(default: str, doc: str) -> Any:
    return key(Corpora(), default, doc)


def weights_of(input_dir: InputDir) -> dict[str, float]:
    """The paths and weights of a blend; of one path, with weight 1."""
    return {input_dir: 1.0} if isinstance(input_dir, str) else dict(input_dir)
