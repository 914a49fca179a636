"""The command line of text generation: prompts in, texts out."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from io import TextIOWrapper
from typing import Any, NamedTuple

from trainer.config.layers import Override
from trainer.errors import WRONG_USAGE, UserError
from trainer.stop import StopRequest
from trainer.tasks.arguments import TaskParser
from trainer.tasks.input_texts import read_prompts, require_utf8
from trainer.tasks.running import Loaded, loaded
from trainer.tasks.writing import Written, encoded, require_room, write

SEPARATOR = "-" * 15  # between texts, as in nanoGPT
# Flags and the keys of the Generation section that they set.
KEYS = {
    "top_k": "top_k",
    "top_p": "top_p",
    "temperature": "temperature",
    "repetition_penalty": "repetition_penalty",
    "min_length": "min_dec_len",
    "max_length": "max_dec_len",
    "num_return_sequences": "num_return_sequences",
}


class Prompt(NamedTuple):
    text: str
    tokens: list[int]


def run(description: str, arguments: Sequence[str], stop: StopRequest) -> None:
    given = _parser(description).parse_args(arguments)
    texts = _given_prompts(given)
    is_interactive = not texts
    if isinstance(sys.stdout, TextIOWrapper):  # of what the terminal cannot show
        sys.stdout.reconfigure(errors="replace")
    with loaded(given, generation_overrides(given), "--batch-size") as model:
        if is_interactive:
            _converse(model, given, stop)
        else:
            _write_all(model, given, _prompts(model, texts, given.truncate), stop)


def _parser(description: str) -> TaskParser:
    parser = TaskParser(description)
    parser.add_argument("prompts", metavar="PROMPT", nargs="*", help="text to continue")
    parser.add_argument(
        "--prompts", dest="file", metavar="FILE", help="one per line, *.jsonl, or - for stdin"
    )
    add_generation_flags(parser)
    parser.add_argument("--seed", type=int, metavar="N", help="default: Global.seed")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="prompts at a time")
    parser.add_argument("--truncate", action="store_true", help="use the end of long prompts")
    parser.add_argument("--tokenizer", metavar="PATH", help="bytes, or the files of a tokenizer")
    parser.add_argument("--json", action="store_true", help="print one JSON object per text")
    return parser


def add_generation_flags(parser: TaskParser) -> None:
    for flag, key in KEYS.items():
        name = f"--{flag.replace('_', '-')}"
        parser.add_argument(name, dest=flag, metavar="N", help=f"sets Generation.{key}")
    parser.add_argument("--greedy", action="store_true", help="always the most likely token")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before it; repeatable"
    )


def generation_overrides(given: Namespace) -> list[Override]:
    """The flags as overrides: they are checked like the keys of a config."""
    if given.num_return_sequences == "0":
        raise UserError("--num-return-sequences 0: nothing to write", "use 1 or more", WRONG_USAGE)
    if _is_zero(given.temperature):
        message = f"--temperature {given.temperature} would divide by zero"
        raise UserError(message, "for the most likely text, use --greedy", WRONG_USAGE)
    overrides = [
        Override(f"Generation.{key}", value, f"--{flag.replace('_', '-')} {value}")
        for flag, key in KEYS.items()
        if (value := getattr(given, flag)) is not None
    ]
    if given.greedy:
        overrides.append(Override("Generation.decode_strategy", "greedy_search", "--greedy"))
    if given.stop:
        overrides.append(Override("Generation.stop_words", tuple(given.stop), "--stop"))
    if getattr(given, "seed", None) is not None:
        overrides.append(Override("Global.seed", str(given.seed), f"--seed {given.seed}"))
    return overrides


def _is_zero(text: str | None) -> bool:
    try:
        return text is not None and float(text) == 0
    except ValueError:  # the check of the key says so
        return False


def _given_prompts(given: Namespace) -> list[str]:
    """The prompts of the command line and of the file; none, if a person will type them."""
    for name, text in [*enumerate(given.prompts, 1), *(("--stop", stop) for stop in given.stop)]:
        require_utf8(text, name if isinstance(name, str) else f"prompt {name}")
    texts = [*given.prompts, *(read_prompts(given.file) if given.file else [])]
    if given.file and not texts:
        raise UserError(f"{given.file} has no prompt", "write one per line", WRONG_USAGE)
    if not texts and not sys.stdin.isatty():
        hint = "write it after the checkpoint, or use --prompts FILE"
        raise UserError("no prompt", hint, WRONG_USAGE)
    if given.batch_size < 1:
        raise UserError(f"--batch-size {given.batch_size}: invalid", "use 1 or more", WRONG_USAGE)
    return texts


def _prompts(model: Loaded, texts: Sequence[str], truncate: bool) -> list[Prompt]:
    """Encode all of them first: a mistake in the last one should not cost the time of others."""
    prompts = []
    for number, text in enumerate(texts, 1):
        tokens = encoded(model.tokenizer, text)
        if not truncate:
            require_room(tokens, model.network.context, f"prompt {number}")
        prompts.append(Prompt(text, tokens))
    return prompts


def _write_all(
    model: Loaded, given: Namespace, prompts: Sequence[Prompt], stop: StopRequest
) -> None:
    """Write texts in batches, which the replicas of the model divide among them."""
    mesh, began, num_tokens = model.mesh, time.perf_counter(), 0
    printer = _Printer(given.json, streams=mesh.world == 1)
    for first in range(0, len(prompts), given.batch_size * mesh.layout.dp):
        mesh.heartbeat.tick(f"writing from prompt {first + 1}")
        if mesh.total(bool(stop.signal))[0]:
            break
        begin = first + mesh.at.dp * given.batch_size
        own = _written(model, prompts[begin : begin + given.batch_size], begin, printer, stop)
        # One rank of each replica tells; the others have the same texts.
        is_teller = mesh.at._replace(dp=0) == (0, 0, 0, 0)
        told = mesh.gather([list(written) for written in own] if is_teller else [])
        texts = [Written(*fields) for replica in told for fields in replica]
        num_tokens += sum(text.num_tokens for text in texts)
        if mesh.is_first and not printer.streams:
            printer.write(prompts[first:], texts, model.run.Generation.num_return_sequences)
    seconds = time.perf_counter() - began
    model.tell(f"{num_tokens:,} tokens in {seconds:.1f} s ({num_tokens / seconds:,.1f} tokens/s)")
    if stop.signal:
        raise UserError(f"stopped by {stop.signal} before all texts were complete", "run it again")


def _written(
    model: Loaded, prompts: Sequence[Prompt], begin: int, printer: _Printer, stop: StopRequest
) -> list[Written]:
    if not prompts:
        return []
    settings, alone = model.run.Generation, model.mesh.world == 1
    # A prompt has the same seeds in every batch size and layout.
    seed = model.run.Global.seed + begin * settings.num_return_sequences
    is_streamed = printer.streams and len(prompts) * settings.num_return_sequences == 1
    show = printer.shown(prompts[0]) if is_streamed else lambda number, text: None
    texts = write(
        model.network,
        model.tokenizer,
        [prompt.tokens for prompt in prompts],
        settings,
        seed,
        show,
        # With other ranks, all of them must stop at the same token: they finish their batch.
        (lambda: bool(stop.signal)) if alone else (lambda: False),
    )
    if printer.streams:
        printer.end(prompts, texts, settings.num_return_sequences, is_streamed)
    return texts


class _Printer:
    """Prints texts to stdout: a single one while it is written, others when they are complete."""

    def __init__(self, as_json: bool, streams: bool) -> None:
        self.as_json, self.streams, self.count = as_json, streams, 0

    def shown(self, prompt: Prompt) -> Any:
        if self.as_json:
            return lambda number, text: None
        self._separate()
        print(prompt.text, end="", flush=True)
        return lambda number, text: print(text, end="", flush=True)

    def end(
        self, prompts: Sequence[Prompt], texts: Sequence[Written], copies: int, is_streamed: bool
    ) -> None:
        if is_streamed and not self.as_json:
            print(flush=True)
        else:
            self.write(prompts, texts, copies)

    def write(self, prompts: Sequence[Prompt], texts: Sequence[Written], copies: int) -> None:
        for prompt, text in _pairs(prompts, texts, copies):
            if self.as_json:
                print(json.dumps(_fields(prompt, text), ensure_ascii=False), flush=True)
            else:
                self._separate()
                print(f"{prompt.text}{text.text}", flush=True)

    def _separate(self) -> None:
        if self.count:
            print(SEPARATOR)
        self.count += 1


def _pairs(
    prompts: Sequence[Prompt], texts: Sequence[Written], copies: int
) -> Iterator[tuple[Prompt, Written]]:
    for number, text in enumerate(texts):
        yield prompts[number // copies], text


def _fields(prompt: Prompt, text: Written) -> dict[str, Any]:
    return {
        "prompt": prompt.text,
        "text": text.text,
        "prompt_tokens": len(prompt.tokens),
        "tokens": text.num_tokens,
        "finish_reason": text.finish,
        "seed": text.seed,
    }


def _converse(model: Loaded, given: Namespace, stop: StopRequest) -> None:
    """Ask for prompts until the end of the input. Ctrl-C ends a text, and the program between."""
    if model.mesh.world > 1:
        hint = "write the prompt after the checkpoint, or use --prompts FILE"
        raise UserError("prompts cannot be typed in with several ranks", hint, WRONG_USAGE)
    model.tell("Type a prompt, then Enter. Ctrl-C ends a text, Ctrl-D the program.")
    while not stop.signal:
        try:
            line = input("> ")
        except EOFError:
            print(file=sys.stderr)
            return
        try:
            if line:
                (prompt,) = _prompts(model, [line], given.truncate)
                _written(model, [prompt], 0, _Printer(given.json, streams=True), stop)
        except UserError as error:  # the next prompt may be better
            model.tell(f"error: {error.message}\nhint: {error.hint}")
        except KeyboardInterrupt:
            print(flush=True)
