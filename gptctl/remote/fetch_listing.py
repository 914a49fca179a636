"""List what a fetch copies from one host, within the limits. Knows nothing of owners and copies."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from pathlib import Path

from gptctl.engine.error_text import one_line
from gptctl.remote.copy_files import Part
from gptctl.remote.host_error import HostError
from gptctl.remote.limits import MAX_DEPTH
from gptctl.remote.not_copied import MAX_NAMED, NotCopied
from gptctl.remote.sftp import Entry, SftpReader, TooManyEntries
from gptctl.reporting import FetchOptions, Say
from gptctl.text import some_of

CHECKPOINT = re.compile(r"step_\d+(\.aside\d+)?")
# Unfinished checkpoints, and names that would lead out of the target folder.
SKIPPED = re.compile(
    r"step_\d+(\.aside\d+)?\.(tmp|old)|\.lock|\.owner.*|__pycache__|\.{0,2}|.*/.*", re.DOTALL
)


class Walk:
    """Lists the folders of one host, within the limits."""

    def __init__(
        self, files: SftpReader, host: str, options: FetchOptions, say: Say, left_out: NotCopied
    ) -> None:
        self._files, self._host, self._options, self._say = files, host, options, say
        self._left_out = left_out
        self._left = options.max_files

    def below(self, remote: str, local: Path, depth: int = 0) -> Iterator[Part]:
        if depth > MAX_DEPTH:
            why = f"folders are nested more than {MAX_DEPTH} levels deep"
            self._left_out.add(self._host, remote, why, "pack them into an archive there")
            return
        others = []
        for entry in self._entries(remote):
            if SKIPPED.fullmatch(entry.name) or "\0" in entry.name:
                continue
            if CHECKPOINT.fullmatch(entry.name) and not self._options.checkpoints:
                continue
            place = f"{remote}/{entry.name}", local / entry.name
            if stat.S_ISDIR(entry.mode):
                yield from self.below(*place, depth + 1)
            elif stat.S_ISREG(entry.mode):
                yield Part(*place, entry.size, entry.changed)
            # Links and devices: following them could copy any file of the host.
            else:
                others.append(entry.name)
        if others:
            where = f"{self._host}:{one_line(remote)}"
            names = some_of([one_line(name) for name in others], MAX_NAMED)
            self._say(f"not copied from {where}, since they are not regular files: {names}")

    def _entries(self, remote: str) -> list[Entry]:
        try:
            entries = self._files.listed(remote, self._left)
        except PermissionError:
            hint = "change the modes there, and fetch again"
            self._left_out.add(self._host, remote, "no permission to list", hint)
            return []
        except TooManyEntries:
            limit = self._options.max_files
            problem = f"more than {limit:,} files and folders; nothing was copied from there"
            hint = f"try --max-files {10 * limit}, or pack them into an archive there"
            raise HostError(self._host, problem, hint) from None
        self._left -= len(entries)
        return entries
