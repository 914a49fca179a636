"""The launcher: a run config and a cluster profile become a job that starts right the first time. No torch."""

import os.path
import sys

__version__ = "0.1.0"

# `trainer` is a common name: ours is the one beside this package, whatever the current folder or PYTHONPATH holds.
_beside = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, _beside)
import trainer  # noqa: E402, F401

sys.path.remove(_beside)
