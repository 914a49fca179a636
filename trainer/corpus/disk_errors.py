"""Explains why `prepare` cannot write: which file, what the system says, and what to do."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.errors import UserError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PERMISSIONS = (errno.EACCES, errno.EPERM, errno.EROFS)
_OCCUPIED = (errno.EISDIR, errno.EEXIST, errno.ENOTDIR, errno.ELOOP, errno.ENOTEMPTY)


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # Of a rename, the second name: the first one is temporary.
        name = error.filename2 or error.filename
        where = os.fspath(name) if isinstance(name, (str, Path)) else str(folder.parent)
        reason = error.strerror or str(error)
        raise UserError(f"cannot write to {where}: {reason}", _hint_of(error)) from None


def _hint_of(error: OSError) -> str:
    again = "then run the same command again: it continues where it was"
    if error.errno in _FULL:
        return f"free some space, {again}"
    if error.errno in _PERMISSIONS:
        return f"check the permissions, or use another --output; {again}"
    if error.errno in _OCCUPIED:
        return "move it away, or use another --output"
    return f"fix it, {again}"
