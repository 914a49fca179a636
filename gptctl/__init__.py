"""Launch distributed GPT training jobs. This package never imports torch."""

__version__ = "0.1.0"
