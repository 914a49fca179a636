"""Tokenize text into files that the trainer reads: the program of `gptctl data prepare` as a job.

python -m trainer.tasks.prepare_data books/ --output data/books --tokenizer tokenizer
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from trainer.corpus.prepare import CONTINUES, SHARD_MB, Request, prepare
from trainer.program import run_program
from trainer.stop import StopRequest
from trainer.tasks.data_arguments import DataParser, Reporter, ended_by, is_first, print_facts


def main(arguments: Sequence[str] | None = None) -> int:
    return run_program(_prepare, sys.argv[1:] if arguments is None else arguments, is_task=True)


def _prepare(arguments: Sequence[str], stop: StopRequest) -> None:
    given = vars(_parser().parse_args(arguments))
    as_json, no_eos = given.pop("json"), given.pop("no_eos")
    if not is_first():
        return
    reporter = Reporter(stop)
    with ended_by(stop, CONTINUES):
        done = prepare(Request(**given, append_eos=not no_eos), lambda now: reporter(now.text))
    print_facts(done.as_json(), as_json)


def _parser() -> DataParser:
    parser = DataParser(__doc__ or "")
    parser.add_argument("--output", required=True, metavar="PREFIX")
    parser.add_argument("--tokenizer", default="bytes", metavar="PATH")
    parser.add_argument("--eos", metavar="TOKEN", help="the end token; default: the tokenizer's")
    parser.add_argument("--no-eos", action="store_true")
    parser.add_argument("--output-format", choices=["npy", "npz", "megatron"], default="npy")
    parser.add_argument("--dedupe", action="store_true", help="leave out exact copies")
    parser.add_argument("--no-merge", dest="merge", action="store_false", help="keep all shards")
    parser.add_argument("--workers", type=int, metavar="N", help="default: one per core")
    parser.add_argument("--shard-mb", type=float, default=SHARD_MB, metavar="MB")
    parser.add_argument("--overwrite", action="store_true")
    return parser


if __name__ == "__main__":
    sys.exit(main())
