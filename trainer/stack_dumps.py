"""Makes a rank write its Python stacks to a file when it gets SIGURG: for `gptctl stacks`.

A job has a copy of this file as `python/sitecustomize.py`, which Python imports before the program
starts. SIGURG, because its default action is to do nothing: a program that does not run this file
is not disturbed, and neither torchrun, schedulers nor the trainer use the signal. faulthandler
needs no Python thread to run, so a rank that hangs in C code answers, too. Standard library only.
"""

from __future__ import annotations

import os
import sys


def install() -> None:
    """Restore what the program would see without this file, and register the signal."""
    own = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != own]
    kept = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry != own]
    os.environ["PYTHONPATH"] = os.pathsep.join(kept)
    if not any(kept):
        del os.environ["PYTHONPATH"]
    _import_next()
    # Whatever is wrong here, the program must run.
    try:
        _register()
    except Exception as error:
        print(f"gptctl stacks will not work for this rank: {error}", file=sys.stderr)


def _import_next() -> None:
    """Import the sitecustomize of the user or the system, which this one hides."""
    hidden_by = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", hidden_by)


def _register() -> None:
    import faulthandler
    import signal

    folder, rank = os.environ["GPTCTL_ATTEMPT_DIR"], int(os.environ["RANK"])
    file = os.open(
        os.path.join(folder, f"stacks.{rank}"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600
    )
    faulthandler.register(signal.SIGURG, file=file, all_threads=True)


if __name__ == "sitecustomize":
    install()
