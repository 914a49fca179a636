"""Export a checkpoint as GPT-2 for transformers, vLLM and other programs.

usage: python -m trainer.tasks.export_weights output/step_1000 --output gpt2-export
       python -m trainer.tasks.export_weights output --output gpt2-half --dtype bfloat16
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.program import run_program
from trainer.stop import StopRequest

if TYPE_CHECKING:
    import argparse

    from trainer.config.sections import RunConfig
    from trainer.corpus.tokenizer import Tokenizer
    from trainer.tasks.arguments import Opened

DTYPES = ("float32", "float16", "bfloat16")
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
NO_TOKENIZER = "none"


def main(arguments: Sequence[str] | None = None) -> int:
    return run_program(_export, sys.argv[1:] if arguments is None else arguments, is_task=True)


def _export(arguments: Sequence[str], stop: StopRequest) -> None:
    from trainer.mesh import machines
    from trainer.tasks.arguments import open_checkpoint, task_config
    from trainer.weights.checkpoint_weights import CheckpointWeights
    from trainer.weights.export import export

    parsed = _parse(arguments)
    if os.environ.get("RANK", "0") != "0":  # under torchrun: one rank is enough
        return
    opened = open_checkpoint(parsed.checkpoint)
    run = task_config(opened, parsed.config, parsed.override, machines()).run
    tokenizer = _tokenizer(opened, parsed.tokenizer)
    weights = CheckpointWeights(opened.folder, opened.facts, run.Model)
    target = _target(parsed, run, tokenizer)

    def check_stop() -> None:
        if stop.signal:
            raise KeyboardInterrupt

    names = export(weights, target, check_stop)
    _report(parsed, opened, target.output, names)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    from trainer.tasks.arguments import TaskParser

    parser = TaskParser("Export a checkpoint as GPT-2 for transformers, vLLM and other programs.")
    parser.add_argument("--output", metavar="DIR", required=True, help="a new folder")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="type of the weights")
    parser.add_argument(
        "--tokenizer", metavar="SOURCE", help="tokenizer files, bytes, or none: export without one"
    )
    parser.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        type=_size,
        default=_size("5GB"),
        help="largest file; default: 5GB",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser.parse_args(arguments)


def _size(text: str) -> int:
    """A size such as 5GB or 500MB. argparse reports ValueError as an invalid value."""
    number = re.fullmatch(r"([0-9]{1,12})([KMGT]B)?", text.upper())
    if not number or int(number[1]) == 0:
        raise ValueError(text)
    return int(number[1]) * UNITS[number[2] or ""]


def _tokenizer(opened: Opened, given: str | None) -> Tokenizer | None:
    """The tokenizer of the checkpoint, or None if none is known."""
    from trainer.tasks.tokenizers import tokenizer_of

    if given == NO_TOKENIZER or (given is None and not _is_known(opened)):
        if given is None:
            hint = "use --tokenizer SOURCE to add one"
            print(f"the tokenizer of {opened.folder} is not known: {hint}", file=sys.stderr)
        return None
    return tokenizer_of(opened, given)


def _is_known(opened: Opened) -> bool:
    from trainer.tasks.tokenizers import places

    facts = opened.facts.get("vocabulary"), opened.facts.get("tokenizer")
    return any(facts) or any(folder.is_dir() for folder in places(opened.folder))


def _target(parsed: argparse.Namespace, run: RunConfig, tokenizer: Tokenizer | None) -> Any:
    from trainer.weights.export import Target
    from trainer.weights.tokenizer_files import tokenizer_files

    end, texts = run.Data.Train.dataset.eos_id, dict[str, bytes]()
    if tokenizer is not None:
        end = tokenizer.eos_id
        texts = tokenizer_files(tokenizer, run.Model.max_position_embeddings)
        if not texts:
            print("GPT-2 has no class for this tokenizer: exported without it", file=sys.stderr)
    # -1 means none; a token outside of the vocabulary would make others fail.
    end = end if end is not None and 0 <= end < (run.Model.vocab_size or 0) else None
    return Target(Path(parsed.output), parsed.dtype, parsed.max_shard_size, end, texts)


def _report(parsed: argparse.Namespace, opened: Opened, output: Path, names: list[str]) -> None:
    if parsed.json:
        step = opened.facts.get("step")
        facts = {"checkpoint": str(opened.folder), "step": step, "dtype": parsed.dtype}
        print(json.dumps({"output": str(output), **facts, "files": names}))
    else:
        print(f"exported {opened.folder} to {output}: {', '.join(names)}", file=sys.stderr)
        print(output)


if __name__ == "__main__":
    sys.exit(main())
