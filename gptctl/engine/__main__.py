"""Start a part of the engine: engine.pyz MODULE RUN_DIR …, from a job's folder.

In old syntax: a Python that cannot run the engine gets far enough to report that through agent.sh.
"""

import os
import sys

if sys.version_info < (3, 10):  # noqa: UP036
    script = os.path.join(os.path.dirname(sys.argv[0]), "agent.sh")
    os.execlp("bash", "bash", script, "old")

import runpy

runpy.run_module("gptctl.engine." + sys.argv.pop(1), run_name="__main__", alter_sys=True)
