"""Import weights of Hugging Face, nanoGPT or Megatron as a checkpoint to start training from.

usage: python -m trainer.tasks.import_weights gpt2/ --output gpt2-checkpoint > model.yaml
       python -m trainer.tasks.import_weights ckpt.pt --output start -o Model.vocab_size=50257
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NoReturn

from trainer.errors import WRONG_USAGE, UserError
from trainer.program import run_program
from trainer.stop import StopRequest

if TYPE_CHECKING:
    import argparse

    from trainer.config import Override
    from trainer.config.sections import Model
    from trainer.weights.matching import Matched

TOKENIZER = "tokenizer"
# Each of them alone is a tokenizer.
TOKENIZER_FILES = (("tokenizer.json",), ("vocab.json", "merges.txt"))


def main(arguments: Sequence[str] | None = None) -> int:
    return run_program(_import, sys.argv[1:] if arguments is None else arguments, is_task=True)


def _import(arguments: Sequence[str], stop: StopRequest) -> None:
    from trainer.weights.importing import facts_of, require_new, require_tied, write_checkpoint
    from trainer.weights.matching import match
    from trainer.weights.sources import open_weights

    parsed = _parse(arguments)
    if os.environ.get("RANK", "0") != "0":  # under torchrun: one rank is enough
        return
    source, output = Path(parsed.source), Path(parsed.output)
    require_new(output)
    matched = match(open_weights(source), _overrides(parsed.override), parsed.megatron_version)
    require_tied(matched)
    for note in matched.notes:
        print(f"warning: {note}", file=sys.stderr)

    def check_stop() -> None:
        if stop.signal:
            raise KeyboardInterrupt

    try:
        tokenizer = _copy_tokenizer(source, output, matched)
        facts = facts_of(matched.run, source, matched.family, tokenizer)
        folder = write_checkpoint(matched, output, facts, check_stop)
    except OSError as error:
        message = f"cannot write {error.filename or output}: {error.strerror or error}"
        raise UserError(message, "use another --output, or free space on its disk") from None
    _report(parsed, folder, matched.run.Model)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    from trainer.tasks.arguments import TaskParser

    parser = TaskParser(
        "Import weights of Hugging Face, nanoGPT or Megatron as a checkpoint.", has_checkpoint=False
    )
    parser.add_argument("source", metavar="SOURCE", help="a folder, or *.safetensors, *.bin, *.pt")
    parser.add_argument("--output", metavar="CHECKPOINT", required=True, help="a new folder")
    parser.add_argument(
        "-o",
        "--override",
        metavar="K=V",
        action="append",
        default=[],
        help="a key of Model that SOURCE does not tell, such as Model.num_attention_heads=12",
    )
    parser.add_argument(
        "--megatron-version",
        metavar="N",
        type=float,
        help="checkpoint_version of Megatron: the order of query, key and value",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser.parse_args(arguments)


def _overrides(texts: Sequence[str]) -> list[Override]:
    from trainer.config import Override

    overrides = [Override.parse(text) for text in texts]
    for override in overrides:
        if not override.key.startswith("Model."):
            hint = "only keys of Model, such as Model.num_attention_heads=12"
            raise UserError(f"{override.source}: not a key of the model", hint, WRONG_USAGE)
    return overrides


def _copy_tokenizer(source: Path, output: Path, matched: Matched) -> dict[str, Any] | None:
    """Copy the tokenizer beside the checkpoint, and describe it for the manifest."""
    from trainer.durable import replacing
    from trainer.weights.source_files import LARGEST_TOKENIZER, exists, read_source

    folder, target = source if source.is_dir() else source.parent, output / TOKENIZER
    complete = (names for names in TOKENIZER_FILES if all(exists(folder / name) for name in names))
    files = {name: read_source(folder / name, LARGEST_TOKENIZER) for name in next(complete, ())}
    _require_own(target, files)
    if not files:
        return None
    facts = _described(files)
    if facts and facts["vocab_size"] > (matched.run.Model.vocab_size or 0):
        _refuse_tokenizer(folder, facts["vocab_size"], matched)
    target.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        with replacing(target / name) as stream:
            stream.write(data)
    return facts


def _require_own(target: Path, files: dict[str, bytes]) -> None:
    """Refuse a tokenizer that is there already, unless a killed import has copied this one."""
    from trainer.weights.source_files import LARGEST_TOKENIZER, read_source

    if not os.path.lexists(target):
        return
    is_folder = target.is_dir() and not target.is_symlink()
    names = {entry.name for entry in target.iterdir()} if is_folder else set()
    unfinished = {name for name in names if name.partition(".part")[0] in files} - files.keys()
    if not is_folder or any(
        name not in files or read_source(target / name, LARGEST_TOKENIZER) != files[name]
        for name in names - unfinished
    ):
        message = f"{target} exists, and is not the tokenizer of these weights"
        raise UserError(message, "use another --output, or move that folder away")


def _described(files: dict[str, bytes]) -> dict[str, Any] | None:
    from trainer.corpus.tokenizer import open_tokenizer

    with TemporaryDirectory() as place:
        for name, data in files.items():
            Path(place, name).write_bytes(data)
        try:
            tokenizer = open_tokenizer(place)
        except UserError as error:
            reason = error.message.replace(f"{place}/", "")
            print(f"warning: {reason}; it is copied, but not checked", file=sys.stderr)
            return None
    keys = ("kind", "digest", "vocab_size", "eos_id")
    return {key: getattr(tokenizer, key) for key in keys}


def _refuse_tokenizer(folder: Path, tokens: int, matched: Matched) -> NoReturn:
    """Text encoded with this tokenizer would have ids that the model does not know."""
    from trainer.weights.checkpoint_weights import EMBEDDING

    rows, size = matched.stored[EMBEDDING].shape[0], matched.run.Model.vocab_size
    message = f"the tokenizer in {folder} has {tokens:,} tokens, but vocab_size is {size:,}"
    fix = f"use -o Model.vocab_size={tokens}" if tokens <= rows else "use that of these weights"
    raise UserError(message, f"{fix}, or remove the files of the tokenizer")


def _report(parsed: argparse.Namespace, folder: Path, model: Model) -> None:
    from trainer.config.continuation import MODEL_KEYS

    values = {"name": "GPT", **{key: getattr(model, key) for key in MODEL_KEYS}}
    if parsed.json:
        print(json.dumps({"checkpoint": str(folder), "model": values}))
        return
    print(f"imported {parsed.source} to {folder}", file=sys.stderr)
    print(f"to train from it: Engine.save_load.ckpt_dir: {folder}, and this model", file=sys.stderr)
    print("Model:", *(f"  {key}: {value}" for key, value in values.items()), sep="\n")


if __name__ == "__main__":
    sys.exit(main())
