"""Serve a checkpoint over HTTP, to try it: an OpenAI-compatible completions endpoint, and a page.

    python -m trainer.tasks.serve output/step_1000 --port 8000
    curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
         -d '{"prompt": "Once upon a time", "max_tokens": 50}'

It answers one request at a time. For real use, export the model and serve it with vLLM or others.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from trainer.program import run_program
from trainer.stop import StopRequest


def main(arguments: Sequence[str] | None = None) -> int:
    return run_program(_serve, sys.argv[1:] if arguments is None else arguments, is_task=True)


def _serve(arguments: Sequence[str], stop: StopRequest) -> None:
    from trainer.tasks.serving import run  # imports torch

    run(__doc__ or "", arguments, stop)


if __name__ == "__main__":
    sys.exit(main())
