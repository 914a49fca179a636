"""A lock on a folder, so that two runs never delete each other's checkpoints.

`flock` where the file system has it. Elsewhere a file that names its owner, who touches it every
few seconds. An owner that is dead, or has not touched it for a while, is replaced.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.errors import UserError
from trainer.input_files import read_object

LOCK, OWNER = ".lock", ".owner"
HEARTBEAT = 5.0  # seconds
STALE = 30.0  # seconds without a heartbeat after which an owner that is out of sight counts as dead
POLL = 0.5
LARGEST = 4096  # bytes of an owner's file


class FolderLock:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock: int | None = None  # file descriptor, open until the run ends
        self._owner: OwnerFile | None = None

    def take(self, warn: Callable[[str], None]) -> None:
        """Raises UserError if another run has the lock, OSError if the folder is not writable."""
        # In a folder from elsewhere, the name may be a link to a file of the user, or a pipe.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        lock = self._lock = os.open(self.folder / LOCK, flags, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _name_in(lock)
            self.release()
            raise in_use(self.folder, owner) from None
        except OSError as error:
            warn(
                f"the file system of {self.folder} has no flock ({error.strerror}): "
                f"{OWNER} protects it against other runs"
            )
            self._owner = OwnerFile(self.folder)
            self._owner.take()
        with contextlib.suppress(OSError):  # if the disk is full, the lock works without the name
            os.ftruncate(lock, 0)  # the name of an earlier owner
            os.write(lock, f"{os.getpid()} on {socket.gethostname()}\n".encode())

    def release(self) -> None:
        if self._owner:
            self._owner.release()
            self._owner = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def require(self) -> None:
        """Raise OSError if another run took over, for example while this one was suspended."""
        if self._owner and not self._owner.is_ours():
            raise OSError(f"another run has taken over {self.folder}")


def _name_in(lock: int) -> str:
    try:
        return os.read(lock, 200).decode(errors="replace").strip() or "unknown"
    except OSError:  # a pipe without content
        return "unknown"


def in_use(folder: Path, owner: str) -> UserError:
    hint = "wait for it, stop it, or set Engine.save_load.output_dir to another folder"
    return UserError(f"another run is writing to {folder} (process {owner})", hint)


class OwnerFile:
    """A lock that needs nothing but atomic creation and modification times."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file, self.token = folder, folder / OWNER, secrets.token_hex(8)
        self._released = threading.Event()
        self._heartbeat = threading.Thread(target=self._beat, name="owner", daemon=True)

    def take(self) -> None:
        """Create the file, after replacing that of a dead owner. Raises UserError."""
        while not self._create():
            found = _read(self.file)
            if not _is_dead(self.file, found):
                raise in_use(self.folder, f"{found.get('pid')} on {found.get('host')}")
            self._remove(found.get("token"))
        self._heartbeat.start()

    def is_ours(self) -> bool:
        return _read(self.file).get("token") == self.token

    def release(self) -> None:
        self._released.set()
        if self.is_ours():
            self.file.unlink(missing_ok=True)

    def _create(self) -> bool:
        # Written before it gets its name, so that nobody reads an incomplete one. Unlike a rename,
        # a link fails if the name exists.
        content = json.dumps({"token": self.token, **identity()})
        part = self.file.with_name(f"{OWNER}.{self.token}")
        try:
            part.write_text(content)
            os.link(part, self.file)
        except FileExistsError:
            return False
        except OSError:  # a file system without links
            return self._create_exclusively(content)
        finally:
            part.unlink(missing_ok=True)
        return True

    def _create_exclusively(self, content: str) -> bool:
        try:
            with open(self.file, "x") as stream:
                stream.write(content)
        except FileExistsError:
            return False
        return True

    def _remove(self, token: object) -> None:
        """Remove the file of a dead owner, but not one that another run created meanwhile."""
        aside = self.file.with_name(f"{OWNER}.{self.token}.dead")
        with contextlib.suppress(FileNotFoundError):
            self.file.rename(aside)
            if _read(aside).get("token") != token:
                # Another run was faster. If it cannot get its name back, its `require` stops it.
                with contextlib.suppress(OSError):
                    os.link(aside, self.file)
            aside.unlink()

    def _beat(self) -> None:
        while not self._released.wait(HEARTBEAT):
            with contextlib.suppress(OSError):
                if self.is_ours():
                    os.utime(self.file)


def identity() -> dict[str, Any]:
    """This process, so that others that see the same processes know whether it is still alive."""
    return {
        "host": socket.gethostname(),
        "processes": _process_table(),
        "pid": os.getpid(),
        "started": _start_time(os.getpid()),
        "job": os.environ.get("GPTCTL_JOB", ""),
    }


def _is_dead(file: Path, owner: dict[str, Any]) -> bool:
    """Whether the owner has exited, or has not touched its file for a while."""
    pid = owner.get("pid")
    if owner.get("processes") == _process_table() and not _is_of_another_user(pid):
        started = _start_time(pid)
        return started is None or started != owner.get("started")
    # On another host, or before this one was started again, or hidden from this user: watch the
    # file instead of comparing the clocks of two hosts.
    seen, deadline = _modified(file), time.monotonic() + STALE
    while time.monotonic() < deadline:
        time.sleep(POLL)
        if _modified(file) != seen:
            return _modified(file) is None
    return True


def _modified(file: Path) -> int | None:
    try:
        return os.stat(file).st_mtime_ns
    except OSError:
        return None


def _read(file: Path) -> dict[str, Any]:
    try:
        return read_object(file, LARGEST)
    except (OSError, ValueError):
        return {}


def _process_table() -> list[str]:
    """Which kernel and which of its process tables this process is in.

    Not the host name: containers of one host often have the same, and process ids of their own.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return [boot, os.readlink("/proc/self/ns/pid")]
    except OSError:
        return [secrets.token_hex(8)]  # not known, so equal to no other


def _is_of_another_user(pid: object) -> bool:
    """Many clusters mount /proc so that processes of other users seem not to exist."""
    try:
        os.kill(int(str(pid)), 0)
    except PermissionError:
        return True
    except (OSError, ValueError, OverflowError):
        pass
    return False


def _start_time(pid: object) -> str | None:
    """When a process started, in the kernel's ticks: another process may get the same id later."""
    try:
        text = Path(f"/proc/{int(str(pid))}/stat").read_text()
    except (OSError, ValueError):
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]
