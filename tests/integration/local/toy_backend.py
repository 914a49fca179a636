"""A fourth backend in forty lines: jobs run in the background of this machine, under the same supervisor as any other."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from signal import SIGTERM
from typing import Any

from gptctl.backends import Backend, JobState
from gptctl.deadline import Deadline
from gptctl.engine.contract import ENGINE_FILE
from gptctl.engine.job_result import LOST, RUNNING
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.engine.processes import clean_environment, is_alive, send
from gptctl.engine.run_folder import RunFolder
from gptctl.jobs.store import JobRecord
from gptctl.planning.build import JobIdentity, PlanDefaults, Site
from gptctl.reporting import Say
from gptctl.spec.check import Checked


class ToyBackend(Backend):
    def __init__(self, say: Say, limit: Deadline | None = None) -> None:
        self._say = say

    def plan_defaults(self, checked: Checked, site: Site, identity: JobIdentity) -> PlanDefaults:
        return PlanDefaults(host="127.0.0.1", env={"GLOO_SOCKET_IFNAME": "lo"})

    def start(self, plan: LaunchPlan, record: JobRecord) -> dict[str, Any]:
        self._say("a toy starts it …")
        engine = [sys.executable, "-S", os.path.join(plan.remote_dir, ENGINE_FILE), "supervisor", plan.remote_dir]
        null = subprocess.DEVNULL
        subprocess.Popen(engine, env=clean_environment(), stdin=null, stdout=null, stderr=null, start_new_session=True)
        while not (claim := RunFolder(plan.remote_dir).claimed_by()):
            time.sleep(0.05)
        return claim

    def abandon(self, record: JobRecord) -> bool:
        return RunFolder(record.local_dir).try_claim({"abandoned": True})

    def state(self, record: JobRecord) -> JobState:
        return JobState(RUNNING) if is_alive(record.handle) else JobState(LOST, "the toy was killed")

    def cancel(self, record: JobRecord, now: bool) -> None:
        RunFolder(record.local_dir).cancel(now)
        send(record.handle["pid"], SIGTERM)
        while is_alive(record.handle):
            time.sleep(0.05)
