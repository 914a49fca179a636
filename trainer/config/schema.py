"""The JSON Schema of run configs, which lets an editor complete and check them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.config.kinds import section_schema
from trainer.config.sections import RunConfig


def run_schema(others: Mapping[str, type]) -> dict[str, Any]:
    """The schema, including sections of other programs (`others`), such as gptctl's `Launch`."""
    root = section_schema(RunConfig)
    # `_inherited_` is allowed in sections, not at the root.
    properties = {
        name: schema for name, schema in root["properties"].items() if name != "_inherited_"
    }
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",  # what most editors support
        "title": "gptctl run config",
        "type": "object",
        "properties": {
            "_base_": {
                "type": ["string", "null"],
                "description": "a config to start from, relative to this file",
            },
            **properties,
            **{name: section_schema(cls) for name, cls in others.items()},
        },
        "additionalProperties": False,
    }
