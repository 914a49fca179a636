"""Generate text with a checkpoint.

python -m trainer.tasks.generate output/step_1000 "Once upon a time"
python -m trainer.tasks.generate output --prompts prompts.jsonl --greedy --json
python -m trainer.tasks.generate output                  asks for prompts, if run in a terminal
torchrun --nproc-per-node 2 -m trainer.tasks.generate output "Hi" -o Distributed.mp_degree=2
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from trainer.program import run_program
from trainer.stop import StopRequest


def main(arguments: Sequence[str] | None = None) -> int:
    return run_program(_generate, sys.argv[1:] if arguments is None else arguments, is_task=True)


def _generate(arguments: Sequence[str], stop: StopRequest) -> None:
    from trainer.tasks.texts import run  # imports torch

    run(__doc__ or "", arguments, stop)


if __name__ == "__main__":
    sys.exit(main())
