"""A folder of compiled templates, which belongs to the user. Knows bytes, not jinja2.

A file is the SHA-256 of the code and the code. Whatever is wrong with it, the template is compiled
again: jinja2 itself would wait for a FIFO, and run what a bad disk made of the code.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from gptctl.engine.atomic_files import private_files, replacing
from gptctl.engine.file_reading import load_bytes, open_no_link

LARGEST = 4 << 20  # bytes of one template; the bundled ones have up to 20,000
DIGEST = hashlib.sha256().digest_size


def is_private(folder: Path) -> bool:
    """Create the folder; return False if that fails, or if others could write code there."""
    try:
        with private_files():
            folder.mkdir(parents=True, exist_ok=True)
        found = folder.stat()
    except OSError:
        return False
    return found.st_uid == os.getuid() and not found.st_mode & 0o077


def load(file: Path) -> bytes:
    """The code in a file; empty if it is missing or damaged."""
    try:
        data = load_bytes(file, LARGEST, open_no_link)
    except (OSError, ValueError):
        return b""
    digest, code = data[:DIGEST], data[DIGEST:]
    return code if hashlib.sha256(code).digest() == digest else b""


def save(file: Path, code: bytes) -> None:
    """Write the code of a template, if the disk allows it: the next command compiles it again."""
    with suppress(OSError), replacing(file) as stream:
        stream.write(hashlib.sha256(code).digest() + code)
