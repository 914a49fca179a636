"""The option `--prometheus` of `list`: jobs as metrics, in a file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gptctl.cli.session import Session


def write_prometheus(session: Session, rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Write the rows of `list`; how well jobs use their GPUs is read of running ones only."""
    from gptctl.cli import ui
    from gptctl.engine.job_result import RUNNING
    from gptctl.jobs.costs import EarlierSteps, ledger_of_job, user_of
    from gptctl.jobs.prometheus import textfile, write

    now, goodput = time.time(), dict[str, float | None]()
    earlier = EarlierSteps(session.store)
    for row in rows:
        if row["state"] == RUNNING:
            record = session.store.find(row["job"])
            ledger = ledger_of_job(record, RUNNING, earlier, now)
            goodput[record.id] = ledger.goodput
    user = user_of()
    ui.print_text(str(write(folder, textfile(rows, goodput, user, now), user)))
