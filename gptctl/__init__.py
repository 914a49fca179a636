"""The launcher: a run config and a cluster profile become a job that starts right the first time. No torch."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

__version__ = "0.1.0"

if "trainer" not in sys.modules:
    # A common name: ours is the one beside this package, whatever the current folder or PYTHONPATH holds.
    _spec = spec_from_file_location("trainer", Path(__file__).resolve().parents[1] / "trainer" / "__init__.py")
    if _spec and _spec.loader:
        sys.modules["trainer"] = module_from_spec(_spec)
        _spec.loader.exec_module(sys.modules["trainer"])
