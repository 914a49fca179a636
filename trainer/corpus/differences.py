"""Says which options of `prepare` differ from those of an unfinished call, as they are typed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_FLAGS = {"append_eos": "--no-eos", "merge": "--no-merge"}  # given: the setting is False
_SHOWN = 3  # input files


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """`--documents line, now paragraph` for each option that differs."""
    differing = [name for name in now if before.get(name) != now[name]]
    return [text for name in differing for text in _described(name, before.get(name), now[name])]


def _described(name: str, before: Any, now: Any) -> Iterator[str]:
    if name == "tokenizer":
        yield from _tokenizers(before, now)
    elif name == "list_of_input_files":
        yield f"INPUT: {_inputs(before, now)}"
    elif name in _FLAGS:
        given = f"{_FLAGS[name]} given", f"{_FLAGS[name]} not given"
        yield f"{given[bool(before)]}, now {given[bool(now)].rpartition(_FLAGS[name])[2].strip()}"
    elif name == "dedupe":
        yield "--dedupe given, now not given" if before else "--dedupe not given, now given"
    else:
        yield f"--{name.replace('_', '-')} {_shown(before)}, now {_shown(now)}"


def _shown(value: Any) -> str:
    # 128 and 128.0 are the same option.
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)


def _tokenizers(before: Any, now: dict[str, Any]) -> Iterator[str]:
    before = before if isinstance(before, dict) else {}
    if before.get("digest") != now["digest"]:
        texts = [f"{each.get('kind')} of {each.get('vocab_size')} tokens" for each in (before, now)]
        same = " (its files differ)" if texts[0] == texts[1] else ""
        yield f"--tokenizer {texts[0]}, now {texts[1]}{same}"
    elif before.get("eos_id") != now["eos_id"]:
        yield f"--eos token {before.get('eos_id')}, now token {now['eos_id']}"


def _inputs(before: Any, now: list[list[Any]]) -> str:
    """What happened to the files: added, missing, changed."""
    old, new = _by_path(before), _by_path(now)
    found = {
        "new": [path for path in new if path not in old],
        "missing": [path for path in old if path not in new],
        "changed": [path for path in new if path in old and old[path] != new[path]],
    }
    texts = [_list(what, paths) for what, paths in found.items() if paths]
    return ", ".join(texts) or "the same files in another order"


def _list(what: str, paths: list[str]) -> str:
    rest = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return f"{' '.join(paths[:_SHOWN])}{rest} {'are' if len(paths) > 1 else 'is'} {what}"


def _by_path(listed: Any) -> dict[str, Any]:
    files = listed if isinstance(listed, list) else []
    return {str(each[0]): each[1:] for each in files if isinstance(each, list) and each}
