"""Scores the samples of an evaluation on all ranks, and reports the result.

Shapes: B samples of a batch, T tokens.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.checkpoint_names import METRICS
from trainer.config.layers import Override
from trainer.config.sections import RunConfig
from trainer.durable import replacing
from trainer.errors import WRONG_USAGE, UserError
from trainer.inference.scoring import Scoring
from trainer.loss import IGNORED
from trainer.stop import StopRequest
from trainer.tasks.arguments import TaskParser
from trainer.tasks.eval_samples import Corpus, Sample, cloze_samples, perplexity_samples
from trainer.tasks.input_texts import Document, read_documents
from trainer.tasks.running import Loaded, loaded

MAX_EXPONENT = 20  # as in Megatron-LM: a larger perplexity says nothing any more
NOT_FINITE = "check the weights, and try -o Engine.mix_precision.enable=False"
PROGRESS_PERIOD = 1.0  # seconds: a small model has hundreds of batches in one
Result = dict[str, Any]


def run(description: str, arguments: Sequence[str], stop: StopRequest) -> None:
    given = _parser(description).parse_args(arguments)
    documents: list[Document] = []

    def look(run: RunConfig) -> None:
        documents.extend(_documents(run.Offline_Eval.eval_path))

    with loaded(given, _overrides(given), "Offline_Eval.batch_size", look) as model:
        result = evaluate(model, documents, stop)
        if model.mesh.is_first:
            if not math.isfinite(result["loss"]):
                model.tell(f"warning: the loss is {result['loss']}: {NOT_FINITE}")
            print(_json(result) if given.json else table(result), flush=True)
            record(model, result)


def _parser(description: str) -> TaskParser:
    parser = TaskParser(description)
    parser.add_argument("path", metavar="FILE", nargs="?", help="text, or *.jsonl with `text`")
    parser.add_argument("--cloze", action="store_true", help="predict the last word of each line")
    parser.add_argument("--tokenizer", metavar="PATH", help="bytes, or the files of a tokenizer")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def _overrides(given: Namespace) -> list[Override]:
    overrides = []
    if given.path is not None:
        overrides.append(Override("Offline_Eval.eval_path", given.path, "FILE", verbatim=True))
    if given.cloze:
        overrides.append(Override("Offline_Eval.cloze_eval", "True", "--cloze"))
    return overrides


class Scores(NamedTuple):
    """Sums over all scored tokens, and the samples whose tokens were all predicted."""

    loss: float
    num_tokens: int
    num_correct: int


def _documents(path: str | None) -> list[Document]:
    if path is None:
        hint = "name it after the checkpoint, or set Offline_Eval.eval_path"
        raise UserError("no file to evaluate on", hint, WRONG_USAGE)
    documents = read_documents(path)
    if not documents:
        raise UserError(f"{path} has no text", "use another file", WRONG_USAGE)
    return documents


def _window_length(model: Loaded) -> int:
    """Windows of more tokens than the model has positions are not possible."""
    settings, context = model.run.Offline_Eval, model.network.context
    if settings.max_seq_len > context:
        asked = [f"max_seq_len {settings.max_seq_len:,}"]
        if settings.overlapping_eval > context and not settings.cloze_eval:
            asked.append(f"overlapping_eval {settings.overlapping_eval:,}")
        model.tell(
            f"Offline_Eval: {' and '.join(asked)}: cut to the model's context of {context:,}."
        )
    return min(settings.max_seq_len, context)


def evaluate(model: Loaded, documents: Sequence[Document], stop: StopRequest) -> Result:
    settings, length = model.run.Offline_Eval, _window_length(model)
    assert settings.eval_path is not None
    model.mesh.heartbeat.tick(f"encoding {settings.eval_path}")
    began = time.perf_counter()
    facts: Result = {"path": settings.eval_path, "checkpoint": str(model.opened.folder)}
    facts |= {"step": model.step, "window": length}
    if settings.cloze_eval:
        samples = cloze_samples(documents, model.tokenizer, length, settings.eval_path)
        scores = score(model, samples, stop)
        facts = {"task": "cloze", **facts, **_cloze_result(scores, len(samples))}
    else:
        stride = min(settings.overlapping_eval, length)
        corpus = perplexity_samples(documents, model.tokenizer, length, stride)
        if not corpus.samples:
            message = f"{settings.eval_path} has only one token: there is nothing to predict"
            raise UserError(message, "use a longer text", WRONG_USAGE)
        scores = score(model, corpus.samples, stop)
        facts = {"task": "perplexity", **facts, "stride": stride, **_perplexity(scores, corpus)}
    seconds = time.perf_counter() - began
    rate = round(scores.num_tokens / seconds, 1)
    return {**facts, "seconds": round(seconds, 3), "tokens_per_second": rate}


def _perplexity(scores: Scores, corpus: Corpus) -> Result:
    loss, ratio = scores.loss / scores.num_tokens, corpus.token_ratio
    return {
        "documents": corpus.num_documents,
        "tokens": scores.num_tokens,
        "words": corpus.num_words,
        "detokenized": corpus.is_detokenized,
        "loss": loss,
        "ppl": _exp(loss),
        "token_ratio": ratio,
        "adjusted_ppl": _exp(loss * ratio),
    }


def _exp(loss: float) -> float:
    return math.exp(MAX_EXPONENT) if loss > MAX_EXPONENT else math.exp(loss)  # nan stays nan


def _cloze_result(scores: Scores, num_samples: int) -> Result:
    return {
        "examples": num_samples,
        "correct": scores.num_correct,
        "accuracy": scores.num_correct / num_samples,
        "loss": scores.loss / scores.num_tokens,
    }


@torch.no_grad()
def score(model: Loaded, samples: Sequence[Sample], stop: StopRequest) -> Scores:
    """Score all samples, each on one of the ranks that read different data."""
    mesh, settings = model.mesh, model.run.Offline_Eval
    sums = torch.zeros(3, dtype=torch.float64)
    began, told = time.perf_counter(), -math.inf
    sizes = settings.batch_size, mesh.layout.data_ranks
    num_rounds = -(-len(samples) // (sizes[0] * sizes[1]))
    for number, batch in enumerate(_rounds(samples, *sizes, mesh.data_rank), 1):
        mesh.heartbeat.tick(f"evaluating batch {number}")
        _require_running(model, stop)
        tokens, labels = _tensors(batch)
        found = model.network(tokens, Scoring(labels.to(mesh.device)))
        # All ranks of an mp group have the same scores, and only the last stage has any.
        if found is not None and mesh.at.mp == 0:
            sums += _sums(found.cpu(), labels)
        now = time.perf_counter()
        is_due = number % settings.logging_freq == 0 and now - told >= PROGRESS_PERIOD
        if is_due and number < num_rounds:
            _tell_progress(model, number, num_rounds, now - began)
            told = now
    model.network.finish()
    loss, num_tokens, num_correct = mesh.total(*sums.tolist())
    return Scores(loss, round(num_tokens), round(num_correct))


def _require_running(model: Loaded, stop: StopRequest) -> None:
    """All ranks must decide alike, so all of them ask."""
    if model.mesh.total(bool(stop.signal))[0]:
        signal = stop.signal or "a signal to another rank"
        raise UserError(f"stopped by {signal} before the evaluation was complete", "run it again")


def _tell_progress(model: Loaded, done: int, total: int, seconds: float) -> None:
    left = seconds / done * (total - done)
    model.tell(f"batch {done:,} of {total:,}, {done / seconds:.2f} batches/s, {left:.0f} s left")


def _rounds(
    samples: Sequence[Sample], batch_size: int, readers: int, reader: int
) -> Iterator[list[Sample]]:
    """The batches of one reader. All readers get as many: sharded ones must compute in step."""
    for begin in range(0, len(samples), batch_size * readers):
        first = begin + reader * batch_size
        # A reader that gets nothing of the last round computes something that does not count.
        yield list(samples[first : first + batch_size]) or [Sample(samples[0].tokens, 0)]


def _tensors(batch: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    """Tokens and labels (B, T). Padding is on the right: no token sees it."""
    longest = max(len(sample.tokens) for sample in batch) - 1
    tokens = torch.zeros((len(batch), longest), dtype=torch.long)
    labels = torch.full((len(batch), longest), IGNORED)
    for row, (text, scored) in enumerate(batch):
        count = len(text) - 1
        tokens[row, :count] = torch.tensor(text[:-1])
        labels[row, count - scored : count] = torch.tensor(text[1:])[count - scored :]
    return tokens, labels


def _sums(scores: Tensor, labels: Tensor) -> Tensor:
    """The sum of losses, the number of scored tokens, and the samples without a mistake."""
    losses, hits = scores.double()
    wanted = labels != IGNORED
    is_right = (hits.bool() | ~wanted).all(-1) & wanted.any(-1)
    return torch.stack([losses.sum(), wanted.sum().double(), is_right.sum().double()])


def table(result: Result) -> str:
    width = max(map(len, result))
    return "\n".join(f"{name:<{width}}  {_shown(value)}" for name, value in result.items())


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _json(result: Result) -> str:
    """JSON has no nan and inf."""
    is_finite = {name: not isinstance(v, float) or math.isfinite(v) for name, v in result.items()}
    return json.dumps({name: v if is_finite[name] else None for name, v in result.items()})


def record(model: Loaded, result: Result) -> None:
    """Write the result beside the checkpoint, if that is the folder of a run."""
    folder = model.opened.folder.resolve().parent
    if not (folder / METRICS).exists():
        return
    # Not into METRICS: a training may be writing to it, and copies of it continue from their end.
    file = folder / f"evaluation.{secrets.token_hex(8)}.json"
    facts = {**result, "time": round(time.time(), 3)}
    try:
        with replacing(file) as stream:
            stream.write(_json(facts).encode())
    except OSError as error:
        model.tell(f"warning: cannot record the result in {file}: {error.strerror}")
        return
    model.tell(f"Recorded in {file}.")
