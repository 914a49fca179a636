"""Evaluate a checkpoint: perplexity of a text, or how often the last word of texts is predicted.

python -m trainer.tasks.evaluate output/step_1000 wiki.valid.tokens
python -m trainer.tasks.evaluate output lambada_test.jsonl --cloze --json
torchrun --nproc-per-node 2 -m trainer.tasks.evaluate output text.txt -o Distributed.mp_degree=2
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from trainer.program import run_program
from trainer.stop import StopRequest


def main(arguments: Sequence[str] | None = None) -> int:
    return run_program(_evaluate, sys.argv[1:] if arguments is None else arguments, is_task=True)


def _evaluate(arguments: Sequence[str], stop: StopRequest) -> None:
    from trainer.tasks.evaluation import run  # imports torch

    run(__doc__ or "", arguments, stop)


if __name__ == "__main__":
    sys.exit(main())
