"""Begins a part of gptctl on a host: begin.py PART RUN_DIR …, in the folder that holds this package.

In old syntax: an old Python gets as far as to go back to agent.sh, which says what is wrong.
"""

import os
import sys

if sys.version_info < (3, 10):  # noqa: UP036
    os.execlp("bash", "bash", "../agent.sh", "old")

import runpy

sys.path[0] = os.getcwd()
runpy.run_module("gptctl.engine." + sys.argv.pop(1), run_name="__main__", alter_sys=True)
