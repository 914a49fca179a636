"""The launcher: a run config and a cluster profile become a job that starts right the first time. No torch."""

__version__ = "0.1.0"
