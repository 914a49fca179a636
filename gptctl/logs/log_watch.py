"""Which log files grew, by inotify where it can be trusted, otherwise by scans.

inotify reports what this host writes. On a network file system it misses what other hosts write,
and neither the name of the file system nor a test file would show that. So every scan checks it:
if a log file grew without a report, inotify is no longer used, and every tick scans all files.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from gptctl.logs.files import LogFile, kind_of
from gptctl.logs.inotify import FolderReports

SCAN_EVERY = 5.0  # seconds between two scans while reports are trusted

_LOG_DIR = -1  # its number among the folders of attempts

Place = tuple[int, str]  # attempt and name of a log file
Scan = Mapping[int, Mapping[str, LogFile]]  # files by attempt and name


class LogWatch:
    def __init__(self, log_dir: str) -> None:
        self._log_dir = log_dir
        self._new: set[int] = set()  # attempts whose folders were not watched at the last scan
        self._unreported: set[Place] = set()  # grown, but the report may still come
        self._is_proven = False  # growth was reported at least once
        self._scanned = float("-inf")
        self._reports: FolderReports | None = None
        try:
            self._reports = FolderReports()
        except OSError:  # too many users of inotify, or none on this system
            self._stop()

    @property
    def is_trusted(self) -> bool:
        return self._is_proven and not self._unreported

    def wait(self, seconds: float) -> None:
        """Return after this time, or earlier if something was reported."""
        if self._reports:
            self._reports.wait(seconds)
        else:
            time.sleep(max(0.0, seconds))

    def written(self) -> set[Place] | None:
        """Which files were written since the last call or scan; None if only a scan can tell."""
        reports = self._reports
        if not reports or not self.is_trusted or time.monotonic() - self._scanned > SCAN_EVERY:
            return None
        reports.read()
        if reports.were_lost or any(map(_is_of_log, reports.renamed)):
            return None
        reports.renamed.clear()
        written, reports.written = reports.written, set()
        return written

    def begin_scan(self) -> None:
        """Call before listing folders: what is reported from now on, the scan may have missed."""
        if self._reports:
            self._reports.read()
            self._reports.renamed.clear()

    def cover(self, attempts: list[int]) -> None:
        """Watch the folders of these attempts from now on."""
        if self._reports:
            folders = {attempt: f"{self._log_dir}/attempt-{attempt}" for attempt in attempts}
            try:
                self._new = self._reports.watch({_LOG_DIR: self._log_dir, **folders})
            except OSError:  # the system has no more watches
                self._stop()

    def end_scan(self, before: Scan, after: Scan) -> None:
        """Compare what grew between two scans with what was reported."""
        reports = self._reports
        if not reports:
            return
        known, reports.written = reports.written, set()
        reports.read()
        known |= reports.written
        grown = {
            (attempt, name)
            for attempt in after.keys() - self._new
            for name, file in after[attempt].items()
            if _grew(before.get(attempt, {}).get(name), file)
        }
        if reports.were_lost:
            self._unreported, reports.were_lost = set(), False
        elif self._unreported - known:
            self._stop()
        else:
            self._is_proven |= bool(grown & known)
            self._unreported = grown - known
        self._scanned = time.monotonic()

    def _stop(self) -> None:
        if self._reports:
            self._reports.close()
        self._reports, self._is_proven = None, False


def _is_of_log(place: Place) -> bool:
    number, name = place
    return number == _LOG_DIR or not name or kind_of(name) is not None


def _grew(before: LogFile | None, now: LogFile) -> bool:
    # A scan keeps the objects of files that did not change.
    return (
        before is not now
        and before is not None
        and before.identity == now.identity
        and before.size < now.size
    )
