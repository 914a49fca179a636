"""Start a module of the engine from a job's folder: bootstrap.py MODULE RUN_DIR …

This file must also run on old Pythons: one that cannot run the engine reports so through agent.sh.
"""

import os
import sys

LIB = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

if sys.version_info < (3, 10):  # noqa: UP036
    os.execlp("bash", "bash", os.path.join(LIB, "..", "agent.sh"), "old")

import runpy  # noqa: E402

# Use the engine that was frozen with this job, whatever else is installed here.
sys.path[0] = LIB
runpy.run_module("gptctl.engine." + sys.argv.pop(1), run_name="__main__", alter_sys=True)
