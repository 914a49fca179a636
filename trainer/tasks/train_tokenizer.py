"""Train a byte-level BPE: the program of `gptctl data train-tokenizer` as a job.

python -m trainer.tasks.train_tokenizer books/ --output tokenizer --vocab-size 32000
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from trainer.corpus.tokenizer_training import (
    END,
    SAMPLE_MB,
    STARTS_AGAIN,
    Training,
    train_tokenizer,
)
from trainer.program import run_program
from trainer.stop import StopRequest
from trainer.tasks.data_arguments import DataParser, Reporter, ended_by, is_first, print_facts


def main(arguments: Sequence[str] | None = None) -> int:
    return run_program(_train, sys.argv[1:] if arguments is None else arguments, is_task=True)


def _train(arguments: Sequence[str], stop: StopRequest) -> None:
    given = vars(_parser().parse_args(arguments))
    as_json = given.pop("json")
    if not is_first():
        return
    reporter, total = Reporter(stop), 0

    def advance(size: int) -> None:
        nonlocal total
        total += size
        reporter(f"read {total:,} bytes")

    with ended_by(stop, STARTS_AGAIN):
        done = train_tokenizer(Training(**given), advance)
    print_facts(done.as_json(), as_json)


def _parser() -> DataParser:
    parser = DataParser(__doc__ or "")
    parser.add_argument("--output", required=True, metavar="DIR")
    parser.add_argument("--vocab-size", type=int, default=32000, metavar="N")
    parser.add_argument("--eos", default=END, metavar="TOKEN")
    parser.add_argument("--sample-mb", type=float, default=SAMPLE_MB, metavar="MB")
    parser.add_argument("--overwrite", action="store_true")
    return parser


if __name__ == "__main__":
    code = main()
    from trainer.watchdog import exit_now  # imports torch, as `main` does

    # Not `sys.exit`: after a stop, a thread of the library still runs, and must not meet an
    # interpreter that is being cleaned up.
    exit_now(code)
