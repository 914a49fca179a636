"""Start a part of the engine from a job's folder: bootstrap.py MODULE RUN_DIR …

Written for old Pythons too: one that cannot run the engine gets far enough to say so through agent.sh.
"""

import os
import sys

LIB = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

if sys.version_info < (3, 10):  # noqa: UP036
    os.execlp("bash", "bash", os.path.join(LIB, "..", "agent.sh"), "old")

import runpy  # noqa: E402

sys.path[0] = LIB  # the engine of this job, whatever else is installed here
runpy.run_module("gptctl.engine." + sys.argv.pop(1), run_name="__main__", alter_sys=True)
