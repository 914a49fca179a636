"""What a job does in the Python of its ranks and of torchrun, before their programs start.

A rank writes its Python stacks to a file when it gets SIGURG: for `gptctl stacks`. torchrun exits
with launch.sh, and at once if its ranks failed; its store listens on the address of the job, where
torch would use all addresses of the machine.

A job has a copy of this file as `python/sitecustomize.py`, which Python imports first. SIGURG,
because its default action is to do nothing: a program that does not run this file is not disturbed,
and neither torchrun, schedulers nor the trainer use the signal. faulthandler needs no Python thread
to run, so a rank that hangs in C code answers, too. Standard library only.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from types import TracebackType
from typing import Any

PR_SET_PDEATHSIG = 1  # of Linux
BACKLOG = 4096  # connections that wait to be accepted: all ranks connect at the same time


def install() -> None:
    """Restore what the program would see without this file, and do what it is for."""
    own = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != own]
    kept = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry != own]
    os.environ["PYTHONPATH"] = os.pathsep.join(kept)
    if not any(kept):
        del os.environ["PYTHONPATH"]
    is_of_user = _import_next()
    # Whatever is wrong here, the program must run.
    if "RANK" not in os.environ:
        with suppress(Exception):
            _die_with_parent()
        # A user's sitecustomize may be meant for each rank: then each starts a Python of its own.
        if os.environ.pop("GPTCTL_FORK_RANKS", None) and not is_of_user:
            with suppress(Exception):
                from trainer.forked_rank import make_torchrun_fork

                make_torchrun_fork()
        # Without torch, or with another version of it, torchrun starts as it always does.
        with suppress(Exception):
            _bind_store()
        _exit_after_report()
        return
    register_stacks()


def _import_next() -> bool:
    """Import the sitecustomize that this one hides. Returns whether it is a user's.

    Those of Linux distributions are in the standard library's folder.
    """
    hidden_by = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # type: ignore[import-not-found]
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        return False
    finally:
        sys.modules.setdefault("sitecustomize", hidden_by)
    return os.path.dirname(str(sitecustomize.__file__)) != os.path.dirname(os.__file__)


def register_stacks() -> None:
    """Let SIGURG write the stacks of this rank. If that fails, the rank runs without it."""
    try:
        _register_stacks()
    except Exception as error:
        print(f"gptctl stacks will not work for this rank: {error}", file=sys.stderr)


def _register_stacks() -> None:
    import faulthandler
    import signal

    folder, rank = os.environ["GPTCTL_ATTEMPT_DIR"], int(os.environ["RANK"])
    # Neither waits for a FIFO nor follows a link.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW
    file = os.open(os.path.join(folder, f"stacks.{rank}"), flags, 0o600)
    faulthandler.register(signal.SIGURG, file=file, all_threads=True)


def _die_with_parent() -> None:
    """Ask the kernel to kill torchrun when launch.sh exits; its ranks exit with it.

    launch.sh exits after torchrun, unless it is killed. Then nobody else may know of torchrun: a
    scheduler that follows parents, as Slurm does without cgroups, has lost it.
    """
    import ctypes
    import signal

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _exit_after_report() -> None:
    """Let torchrun exit as soon as it has reported the ranks that failed.

    Otherwise Python first takes torch apart, for almost half a second of every restart.
    """
    show = sys.excepthook

    def show_and_exit(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        show(kind, error, trace)
        if kind.__name__ == "ChildFailedError":
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
            os._exit(1)

    sys.excepthook = show_and_exit


def _bind_store() -> None:
    """Give the store of torchrun's static rendezvous a socket that we have bound.

    torch has no option for it: its own socket listens on all addresses, whatever host it is given.
    """
    from torch.distributed.elastic.rendezvous import static_tcp_rendezvous as static

    create = static.TCPStore  # type: ignore[attr-defined]

    def bound(host: str, port: int, world: int, is_first: bool, *words: Any, **more: Any) -> Any:
        descriptor = _listening_socket(host, port) if is_first else None
        if descriptor is not None:
            more["master_listen_fd"] = descriptor  # the store closes it
        return create(host, port, world, is_first, *words, **more)

    static.TCPStore = bound  # type: ignore[attr-defined,assignment]


def _listening_socket(host: str, port: int) -> int | None:
    """A socket on this address only; None where torch has to listen on all of them."""
    import ipaddress
    import socket

    try:
        # Not a name: on many hosts, its own name is a loopback address, which others do not reach.
        version = ipaddress.ip_address(host).version
        family = socket.AF_INET if version == 4 else socket.AF_INET6
        return socket.create_server((host, port), family=family, backlog=BACKLOG).detach()
    except (ValueError, OSError):  # OSError: not an address of this machine, behind a NAT
        return None


if __name__ == "sitecustomize":
    install()
