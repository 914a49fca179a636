"""Where this user's state is: jobs, and the queue of this machine."""

from __future__ import annotations

import os
from pathlib import Path


def state_home() -> Path:
    """$XDG_STATE_HOME, or its default."""
    # The XDG standard ignores a relative path: each job, in its own folder, would take another one.
    chosen = os.environ.get("XDG_STATE_HOME", "")
    return Path(chosen if os.path.isabs(chosen) else os.path.expanduser("~/.local/state"))
