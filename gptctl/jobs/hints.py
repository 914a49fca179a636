"""What to change after a failure: one hint for each kind that has a usual fix. Pure."""

from __future__ import annotations

from gptctl.engine.cause import Cause
from gptctl.engine.job_result import FAILED
from gptctl.jobs.failures import Evidence, likely_cause


def hint_of(cause: Cause, is_trainer: bool) -> str:
    """Return a hint for a failure; empty if there is no usual fix.

    From the failure alone: `gptctl why` also reads the logs.
    """
    evidence = Evidence(FAILED, cause.text, (), cause.exit, cause.signal)
    found = likely_cause(evidence)
    return found.signature.fix_for(is_trainer) if found else ""
