"""The verbs for data: text to token files, and back.

Imports inside a verb keep `--help` and completion fast. The work is done by `trainer/corpus/`,
which imports numpy and the tokenizer libraries when it needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from gptctl.cli.data_inputs import INPUT, input_options
from gptctl.cli.data_jobs import DataCommand, run_as_job, runs_as_job
from gptctl.cli.options import NumberRange, as_json_option, examples
from gptctl.cli.session import Session
from gptctl.cli.task_words import tokenizer_path
from gptctl.cli.tasks import task_options
from trainer.errors import ANSWER_IS_NO

if TYPE_CHECKING:
    from trainer.corpus.inspection import Data
    from trainer.corpus.prepare import Prepared, Request
    from trainer.corpus.tokenizer_training import Training

PREPARE = (
    *("output", "tokenizer", "eos", "no_eos", "output_format", "dedupe", "merge", "workers"),
    *("shard_mb", "overwrite"),
)
TRAIN_TOKENIZER = ("output", "vocab_size", "eos", "sample_mb", "overwrite")
SHOWN = 40  # characters of the longest bar of a histogram


@click.group(
    epilog=examples(
        "gptctl data train-tokenizer books/ --output tokenizer --vocab-size 32000",
        "gptctl data prepare books/ --output data/books --tokenizer tokenizer",
        "gptctl data inspect data/books --doc 0",
    )
)
def data() -> None:
    """Turn text into token files for training, and look into them."""


def _taken(typed: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Take a verb's own arguments: what is left says where it runs."""
    return {name: typed.pop(name) for name in (*INPUT, *names)}


@data.command(
    cls=DataCommand,
    epilog=examples(
        "gptctl data prepare corpus.jsonl.zst --output data/corpus --tokenizer tokenizer.json",
        "gptctl data prepare 'books/*.txt' --output data/books --documents paragraph --dedupe",
        "gptctl data prepare wiki/ --output data/wiki --tokenizer gpt2/ --output-format megatron",
        "gptctl data prepare /data/web/ --output /data/web-ids/web --cluster a800 --detach",
    ),
)
@task_options(has_model=False)
@input_options
@click.option("--output", required=True, metavar="PREFIX", help="Write PREFIX_ids.npy and so on.")
@click.option(
    "--tokenizer",
    default="bytes",
    show_default=True,
    metavar="PATH",
    help="A tokenizer.json, a folder with tokenizer files, a sentencepiece *.model, or bytes.",
)
@click.option("--eos", metavar="TOKEN", help="The end-of-document token. Default: the tokenizer's.")
@click.option("--no-eos", is_flag=True, help="Do not end documents with a token.")
@click.option(
    "--output-format",
    type=click.Choice(["npy", "npz", "megatron"]),
    default="npy",
    show_default=True,
    help="PREFIX_ids.npy and PREFIX_idx.npz, PREFIX_ids.npz, or PREFIX.bin and PREFIX.idx.",
)
@click.option("--dedupe", is_flag=True, help="Leave out exact copies of documents.")
@click.option(
    "--merge/--no-merge",
    default=True,
    help="Join all shards into one output, or keep PREFIX-00000 and so on. Default: join.",
)
@click.option("--workers", type=click.IntRange(1), metavar="N", help="Default: one per core.")
@click.option(
    "--shard-mb",
    type=NumberRange(min=0, min_open=True),
    default=128,
    show_default=True,
    metavar="MB",
    help="Input per shard: what is done again after an interruption.",
)
@click.option("--overwrite", is_flag=True, help="Replace existing output; begin again.")
@click.pass_obj
def prepare(session: Session, /, **typed: Any) -> int:
    """Tokenize text into files that the trainer reads.

    INPUT is a file, a folder or a pattern: text, JSON lines (also .gz and .zst) or parquet. All
    cores work, and memory does not grow with the data. If the command is interrupted, run it
    again: it continues after the last complete shard.
    """
    from trainer.corpus.prepare import Request, check_request

    arguments = _taken(typed, PREPARE)
    own = {name: value for name, value in arguments.items() if name != "no_eos"}
    request = Request(**own, append_eos=not arguments["no_eos"])
    if runs_as_job(typed):
        arguments["tokenizer"] = tokenizer_path(arguments["tokenizer"])
        arguments["no_merge"] = not arguments.pop("merge")
        check = partial(check_request, request)
        return run_as_job(session, "prepare_data", arguments, typed, check)
    _prepare_here(request, typed["as_json"])
    return 0


def _prepare_here(request: Request, as_json: bool) -> None:
    from gptctl.cli import ui
    from trainer.corpus.prepare import CONTINUES
    from trainer.corpus.prepare import prepare as run

    try:
        with ui.status_line() as show:
            done = run(request, lambda progress: show(progress.text))
    except KeyboardInterrupt:
        ui.say(f"interrupted: {CONTINUES}")
        raise
    if as_json:
        ui.print_json(done.as_json())
        return
    ui.print_pairs(f"prepared {done.prefix}", [*_summary(done)])
    _print_histogram(done.counts.histogram)
    _print_next_steps(done)


def _summary(done: Prepared) -> Iterator[tuple[str, str]]:
    from trainer.corpus.progress import duration

    counts = done.counts
    yield "documents", f"{counts.documents:,}"
    yield "tokens", f"{counts.tokens:,} ({done.dtype})"
    yield "text", f"{counts.text_bytes:,} bytes, {counts.bytes_per_token:.2f} per token"
    yield "longest", f"{counts.longest:,} tokens"
    left_out = {
        "empty documents": counts.empty,
        "exact copies": counts.duplicates,
        "invalid lines": counts.skipped,
    }
    for name, number in left_out.items():
        if number:
            yield "left out", f"{number:,} {name}"
    if counts.replaced:
        yield "replaced", f"{counts.replaced:,} invalid UTF-8 sequences"
    yield "time", duration(done.seconds)
    if done.resumed:
        yield "continued", f"after {done.resumed} shards of an earlier run"
    yield "files", ", ".join(done.files[:6]) + (", …" if len(done.files) > 6 else "")


def _print_histogram(histogram: dict[str, int]) -> None:
    from gptctl.cli import ui
    from trainer.corpus.summary import histogram_rows

    rows = [*histogram_rows(histogram)]
    most = max((number for _, number in rows), default=1)
    cells = [[name, f"{number:,}", "#" * round(SHOWN * number / most)] for name, number in rows]
    ui.print_table("tokens per document", ["tokens", "documents", ""], cells)


def _print_next_steps(done: Prepared) -> None:
    from gptctl.cli import ui

    ui.say(f"for the run config: Model.vocab_size: {done.tokenizer.vocab_size}")
    ui.say(f"                    Data.Train.dataset.input_dir: {done.prefix}")
    if done.eos_id is not None:
        ui.say(f"                    Data.Train.dataset.eos_id: {done.eos_id}")


@data.command(
    "train-tokenizer",
    cls=DataCommand,
    epilog=examples(
        "gptctl data train-tokenizer corpus.jsonl --output tokenizer --vocab-size 32000",
        "gptctl data train-tokenizer 中文/ --output tokenizer --vocab-size 50000",
    ),
)
@task_options(has_model=False)
@input_options
@click.option("--output", required=True, metavar="DIR", help="Write tokenizer.json to this folder.")
@click.option(
    "--vocab-size",
    type=click.IntRange(257),  # a token for each byte, and the end token
    default=32000,
    show_default=True,
    metavar="N",
    help="Train at most this many tokens.",
)
@click.option(
    "--eos",
    default="<|endoftext|>",
    show_default=True,
    metavar="TOKEN",
    help="Add this token for the end of a document.",
)
@click.option(
    "--sample-mb",
    type=NumberRange(min=0, min_open=True),
    default=1000,
    show_default=True,
    metavar="MB",
    help="Train on about this much of the input, spread evenly.",
)
@click.option("--overwrite", is_flag=True, help="Replace an existing tokenizer.")
@click.pass_obj
def train_tokenizer(session: Session, /, **typed: Any) -> int:
    """Train a byte-level BPE tokenizer, for text in any language."""
    from trainer.corpus.tokenizer_training import Training, check_training

    arguments = _taken(typed, TRAIN_TOKENIZER)
    request = Training(**arguments)
    if runs_as_job(typed):
        check = partial(check_training, request)
        return run_as_job(session, "train_tokenizer", arguments, typed, check)
    _train_here(request, typed["as_json"])
    return 0


def _train_here(request: Training, as_json: bool) -> None:
    from gptctl.cli import ui
    from trainer.corpus.tokenizer_training import STARTS_AGAIN
    from trainer.corpus.tokenizer_training import train_tokenizer as run

    try:
        with _bytes_shown("reading") as advance:
            done = run(request, advance)
    except KeyboardInterrupt:
        ui.say(f"interrupted: {STARTS_AGAIN}")
        raise
    if as_json:
        ui.print_json(done.as_json())
        return
    rows = [
        ("tokens", f"{done.tokenizer.vocab_size:,}"),
        ("trained on", f"{done.text_bytes:,} bytes of text"),
        ("next", f"gptctl data prepare … --tokenizer {request.output}"),
    ]
    ui.print_pairs(f"tokenizer in {request.output}", rows)
    if done.tokenizer.vocab_size < request.vocab_size:
        ui.say(f"note: the text has too few different words for {request.vocab_size:,} tokens")


@contextmanager
def _bytes_shown(what: str, unit: str = "bytes") -> Iterator[Callable[[int], None]]:
    from gptctl.cli import ui

    total = 0
    with ui.status_line() as show:

        def advance(size: int) -> None:
            nonlocal total
            total += size
            show(f"{what}: {total:,} {unit}")

        yield advance


@data.command(
    epilog=examples(
        "gptctl data inspect data/books",
        "gptctl data inspect data/books --doc 3",
        "gptctl data inspect data/books --doc 3 --ids",
    )
)
@click.argument("prefix")
@click.option("--doc", type=int, metavar="N", help="Print the text of this document, from 0.")
@click.option("--ids", is_flag=True, help="With --doc: print its token ids instead.")
@click.option("--tokenizer", metavar="PATH", help="Default: the one beside the data, or bytes.")
@as_json_option
def inspect(prefix: str, doc: int | None, ids: bool, tokenizer: str | None, as_json: bool) -> None:
    """Show what token files contain, or decode a document.

    PREFIX is what `prepare --output` got; a folder of token files, or one of them, works too.
    """
    from gptctl.cli import ui
    from trainer.corpus.inspection import open_data

    found = open_data(prefix)
    if doc is not None:
        _show_document(found, doc, ids, tokenizer, as_json)
    elif as_json:
        ui.print_json(found.facts())
    else:
        facts = found.facts()
        ui.print_pairs(prefix, [*_facts_rows(facts)])
        _print_histogram(facts["histogram"])


def _show_document(found: Data, doc: int, ids: bool, tokenizer: str | None, as_json: bool) -> None:
    from gptctl.cli import ui
    from trainer.corpus.inspection import tokenizer_for

    tokens = found.document(doc)
    text = None if ids else found.decoded(doc, tokenizer_for(found, tokenizer))
    if as_json:
        ui.print_json({"document": doc, "ids": tokens, "text": text})
    elif text is None:
        ui.print_text(" ".join(map(str, tokens)))
    else:
        ui.print_exactly(text if text.endswith("\n") else f"{text}\n")


def _facts_rows(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "documents", f"{facts['documents']:,}"
    yield "tokens", f"{facts['tokens']:,} ({', '.join(facts['dtype'])})"
    yield "longest", f"{facts['longest']:,} tokens"
    if known := facts["tokenizer"]:
        yield "tokenizer", f"{known['kind']}, {known['vocab_size']:,} tokens"
        yield "digest", known["digest"]
    else:
        yield "tokenizer", "unknown: the data has no *_meta.json"
    if facts["eos_id"] is not None:
        yield "end token", str(facts["eos_id"])
    yield "files", ", ".join(facts["files"][:6]) + (", …" if len(facts["files"]) > 6 else "")


@data.command(epilog=examples("gptctl data verify data/books", "gptctl data verify data/ --json"))
@click.argument("paths", nargs=-1, required=True, metavar="PREFIX...")
@as_json_option
def verify(paths: tuple[str, ...], as_json: bool) -> int:
    """Read token files completely, and check them.

    Checks sizes and checksums, that all ids are in the vocabulary of the tokenizer, and that every
    document ends with the end token, as far as PREFIX_meta.json says. Exit code 1: damaged.
    """
    from gptctl.cli import ui
    from trainer.corpus.inspection import FIX
    from trainer.corpus.inspection import verify as run

    results: dict[str, Any] = {}
    with _bytes_shown("verified", "tokens") as advance:
        for path in paths:
            found, problems = run(path, advance)
            results[path] = {
                "documents": len(found.corpus.lengths),
                "tokens": found.num_tokens,
                "problems": problems,
            }
    is_good = not any(result["problems"] for result in results.values())
    if as_json:
        ui.print_json({"valid": is_good, "data": results})
    else:
        for path, result in results.items():
            for problem in result["problems"]:
                ui.print_text(f"error: {problem}")
            if result["problems"]:
                ui.print_text(f"hint: {FIX}")
            if not result["problems"]:
                tokens, documents = result["tokens"], result["documents"]
                ui.print_text(f"{path}: {documents:,} documents, {tokens:,} tokens, no damage")
    return 0 if is_good else ANSWER_IS_NO
