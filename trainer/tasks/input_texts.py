"""Reads the texts that a task works on: a text file, or JSON lines. Torch-free."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from trainer.errors import WRONG_USAGE, UserError
from trainer.input_files import explain, parse_object, read_bytes

LARGEST = 1 << 30  # bytes; tasks read a file as a whole
JSON_LINES = (".jsonl", ".json", ".ndjson")
STDIN = "-"


class Document(NamedTuple):
    """A text, and the line on which it begins."""

    text: str
    line: int = 1


def is_json_lines(path: str) -> bool:
    return Path(path).suffix.lower() in JSON_LINES


def read_documents(path: str, field: str = "text") -> list[Document]:
    """The documents of a file: one per line of JSON, or the whole text. Without empty ones."""
    content = read_text(path)
    documents = [Document(content)]
    if is_json_lines(path):
        documents = [Document(text, line) for line, text in _fields(path, content, (field,))]
    return [document for document in documents if document.text.strip()]


def read_prompts(path: str) -> list[str]:
    """The prompts of a file: one per line of text, or the `prompt` or `text` of lines of JSON."""
    content = read_text(path)
    if is_json_lines(path):
        found = [text for _, text in _fields(path, content, ("prompt", "text"))]
    else:
        found = content.splitlines()
    return [text for text in found if text.strip()]


def read_text(path: str) -> str:
    """A UTF-8 file, or stdin. Raises UserError."""
    try:
        data = sys.stdin.buffer.read(LARGEST) if path == STDIN else read_bytes(path, LARGEST)
    except OSError as error:
        raise UserError(explain(path, error), "name a readable text file", WRONG_USAGE) from None
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        message = f"{path}:{line}: invalid UTF-8 at byte {error.start:,}"
        hint = f"convert it: iconv -f OLD -t UTF-8 {path}"
        raise UserError(message, hint, WRONG_USAGE) from None


def require_utf8(text: str, name: str) -> None:
    """Refuse an argument with other bytes, which Python passes on as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        hint = "write it to a UTF-8 file: --prompts FILE"
        raise UserError(f"{name} is not valid UTF-8", hint, WRONG_USAGE) from None


def _fields(path: str, content: str, names: Sequence[str]) -> Iterator[tuple[int, str]]:
    """The number of each line, and the first of some fields that its object has."""
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            fields = parse_object(line)
        except ValueError as error:
            hint = "write one JSON object per line"
            raise UserError(f"{path}:{number}: invalid JSON: {error}", hint, WRONG_USAGE) from None
        texts = [fields[name] for name in names if isinstance(fields.get(name), str)]
        if not texts:
            wanted = " or ".join(f"`{name}`" for name in names)
            message = f"{path}:{number}: no field {wanted} with a text"
            has = ", ".join(sorted(fields)[:10]) or "no fields"
            hint = f"rename the field that has the text; this line has {has}"
            raise UserError(message, hint, WRONG_USAGE)
        yield number, texts[0]
