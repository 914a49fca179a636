"""The launcher: one run config and one cluster profile become a job that starts right the first time. Never imports torch."""

__version__ = "0.1.0"
