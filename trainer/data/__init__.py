"""The data of a run: three splits of samples, and the batches of this rank for every step."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.config.corpora import weights_of
from trainer.config.resolve import batch_of
from trainer.config.sections import DataPart, Dataset, RunConfig
from trainer.corpus.metadata import Metadata, common_tokenizer, metadata_at, misfit
from trainer.corpus.token_files import Corpus, open_corpus
from trainer.data.blend import Blend, interleaving_of
from trainer.data.chars import Characters, CharSplit
from trainer.data.epochs import Length, run_length, samples_to_index
from trainer.data.gpt import GPTSplit, check_vocabulary, documents_of, open_split
from trainer.data.order import Numbers, permuted
from trainer.device import pinned
from trainer.errors import UserError
from trainer.layout import Batch
from trainer.loss import IGNORED
from trainer.mesh import Mesh

CPU = torch.device("cpu")


class Split(Protocol):
    size: int  # number of different samples
    digest: int  # checksum of the data that samples are cut from
    eos: int | None  # nothing is predicted after this token
    covers_epochs: bool  # its samples are those of all epochs of the run

    def read(self, epochs: Numbers, numbers: Numbers) -> npt.NDArray[np.int64]: ...


class Splits(NamedTuple):
    train: Split
    valid: Split | None
    test: Split | None
    characters: Characters | None  # for a CharDataset
    tokenizer: Metadata | None = None  # of token files, if it is known


class LocalBatch(NamedTuple):
    """The samples of one rank for one update, both (samples, T).

    Labels are IGNORED where nothing is predicted.
    """

    inputs: Tensor
    labels: Tensor

    @property
    def num_predicted(self) -> int:
        # On the CPU, where the batch still is: counting does not wait for a GPU.
        return int(np.count_nonzero(self.labels.numpy() != IGNORED))

    def micro(self, size: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        for inputs, labels in zip(self.inputs.split(size), self.labels.split(size)):
            yield inputs.to(device, non_blocking=True), labels.to(device, non_blocking=True)


def open_data(
    run: RunConfig, mesh: Mesh, warn: Callable[[str], None]
) -> tuple[RunConfig, Splits, Length]:
    """Open the splits. Also returns the config with the counted vocabulary, and the run length."""
    names = {part.dataset.name for part in (run.Data.Train, run.Data.Eval, run.Data.Test)}
    if len(names) > 1:
        raise UserError(
            "Data.Train, Data.Eval and Data.Test use different dataset types",
            "use GPTDataset or CharDataset for all three",
        )
    if names == {"CharDataset"}:
        if not run.Data.Train.dataset == run.Data.Eval.dataset == run.Data.Test.dataset:
            warn(
                "Data.Eval.dataset and Data.Test.dataset are ignored: "
                "a CharDataset evaluates on a part of its training text"
            )
        return _open_characters(run)
    return _open_tokens(run, mesh, warn)


def _open_characters(run: RunConfig) -> tuple[RunConfig, Splits, Length]:
    characters, seed = Characters(run.Data.Train.dataset), run.Global.seed
    train, valid = CharSplit(characters, "train", seed), CharSplit(characters, "valid", seed)
    counted = len(characters.vocabulary)
    if run.Model.vocab_size is not None and run.Model.vocab_size < counted:
        message = (
            f"the text has {counted} different characters, "
            f"but Model.vocab_size is {run.Model.vocab_size}"
        )
        raise UserError(message, "leave Model.vocab_size empty: the trainer counts the characters")
    run = replace(run, Model=replace(run.Model, vocab_size=run.Model.vocab_size or counted))
    evaluated = valid if valid.size else None  # minGPT has no test split: use valid for both
    return run, Splits(train, evaluated, evaluated, characters), run_length(run, train.size)


def _open_tokens(
    run: RunConfig, mesh: Mesh, warn: Callable[[str], None]
) -> tuple[RunConfig, Splits, Length]:
    engine, batch, seed = run.Engine, batch_of(run).global_size, run.Global.seed
    run, tokenizer = _with_tokenizer(run)
    opened = {path: open_corpus(path) for path in _paths(run)}
    # At start, not at the first bad sample, which may come after days.
    for corpus in opened.values():
        check_vocabulary(corpus, run.Model.vocab_size or 0, mesh, run.Data.cache_dir)
    length = run_length(run, _samples_per_epoch(run.Data.Train.dataset, opened))
    # As in FleetX: enough samples for every evaluation of the run.
    evaluations = length.max_steps // engine.eval_freq + 1 if engine.eval_freq > 0 else 1
    wanted = {
        "train": (run.Data.Train, samples_to_index(run, length)),
        "valid": (run.Data.Eval, batch * evaluations * max(1, engine.eval_iters)),
        "test": (run.Data.Test, batch * max(1, engine.test_iters)),
    }

    def open_part(name: str, dataset: Dataset, number: int) -> Split | None:
        weights = weights_of(dataset.input_dir)
        interleaving = interleaving_of(tuple(weights.values()))
        parts = {
            path: open_split(
                opened[path],
                path,
                dataset,
                name,
                interleaving.count(at, number) if len(weights) > 1 else number,
                seed,
                run.Model,
                mesh,
                run.Data.cache_dir,
                warn,
            )
            for at, path in enumerate(weights)
        }
        return _blended(parts, weights)

    splits = [open_part(name, part.dataset, number) for name, (part, number) in wanted.items()]
    assert splits[0] is not None
    return run, Splits(splits[0], splits[1], splits[2], None, tokenizer), length


def _paths(run: RunConfig) -> list[str]:
    """The paths of all corpora, each once."""
    parts = (run.Data.Train, run.Data.Eval, run.Data.Test)
    return [*dict.fromkeys(path for part in parts for path in weights_of(part.dataset.input_dir))]


def _with_tokenizer(run: RunConfig) -> tuple[RunConfig, Metadata | None]:
    """The tokenizer of the data, if it is known, and the config with its end token."""
    known = [each for path in _paths(run) for each in metadata_at(path)]
    tokenizer = common_tokenizer(known)
    if tokenizer is None:
        return run, None
    if problem := misfit(tokenizer, run.Model.vocab_size or 0):
        raise UserError(*problem)
    parts: dict[str, Any] = {
        name: replace(part, dataset=replace(part.dataset, eos_id=tokenizer.eos_id))
        for name, part in vars(run.Data).items()
        if isinstance(part, DataPart) and part.dataset.eos_id is None
    }
    return replace(run, Data=replace(run.Data, **parts)), tokenizer


def _samples_per_epoch(dataset: Dataset, opened: dict[str, Corpus]) -> int:
    """An epoch of a blend has as many samples as all its corpora together."""
    corpora = [opened[path] for path in weights_of(dataset.input_dir)]
    tokens = [int(each.lengths[documents_of(each, dataset, "train")].sum()) for each in corpora]
    return sum((number - 1) // dataset.max_seq_len for number in tokens)


def _blended(parts: dict[str, GPTSplit | None], weights: dict[str, float]) -> Split | None:
    """One split of several corpora; those that are too small to evaluate on are left out."""
    found = {path: split for path, split in parts.items() if split is not None}
    if len(found) < 2:
        return next(iter(found.values()), None)
    return Blend([*found.values()], interleaving_of(tuple(weights[path] for path in found)))


class Start(NamedTuple):
    """The first sample of a batch, and its epoch."""

    number: int
    # None: numbers run on from one epoch to the next, so a batch may have samples of two epochs.
    epoch: int | None = None


class Reader:
    """Reads batches of one split for one rank, from any position.

    The samples of a batch have the global numbers first, first + 1, …; each data rank reads a
    contiguous part of them. So the order does not depend on the layout.
    """

    def __init__(
        self,
        split: Split,
        batch: Batch,
        data_rank: int,
        epoch_length: int,
        shuffle_key: int | None,
        device: torch.device = CPU,
    ) -> None:
        self.split, self.batch, self.data_rank, self.device = split, batch, data_rank, device
        self.epoch_length = epoch_length
        self.shuffle_key = shuffle_key

    def read(self, first: int, epoch: int | None = None) -> LocalBatch:
        """A batch. Within one epoch, the first samples are used again after the last one."""
        begin = first + self.data_rank * self.batch.local
        return self._read(begin + np.arange(self.batch.local, dtype=np.int64), epoch)

    def read_once(self, first: int) -> LocalBatch:
        """A batch that ends with the last sample: what is missing then is padding.

        Nothing is predicted for the padding. Ranks share the samples that are left equally.
        """
        ranks = self.batch.global_size // self.batch.local
        present = max(0, min(self.batch.global_size, self.split.size - first))
        begin, end = (present * rank // ranks for rank in (self.data_rank, self.data_rank + 1))
        batch = self._read(first + begin + np.arange(self.batch.local, dtype=np.int64), 0)
        batch.labels[end - begin :] = IGNORED
        return batch

    def _read(self, numbers: Numbers, epoch: int | None) -> LocalBatch:
        epochs, numbers = np.divmod(numbers, self.epoch_length)
        if epoch is not None:
            epochs[:] = epoch
        if self.split.covers_epochs:
            numbers = numbers + epochs * self.epoch_length
        if self.shuffle_key is not None:
            numbers = permuted(numbers % self.split.size, self.split.size, self.shuffle_key)
        tokens = self.split.read(epochs, numbers)
        inputs, labels = torch.from_numpy(tokens[:, :-1]), torch.from_numpy(tokens[:, 1:].copy())
        # The token after the end of a document belongs to another document.
        if self.split.eos is not None:
            labels[inputs == self.split.eos] = IGNORED
        return LocalBatch(pinned(inputs, self.device), pinned(labels, self.device))

    def batches(self, starts: Iterable[Start], num_workers: int) -> Iterator[LocalBatch]:
        """These batches, read on demand, or ahead by a thread (num_workers > 0)."""
        if num_workers:
            yield from self._ahead(starts)
        else:
            for start in starts:
                yield self.read(*start)

    def _ahead(self, starts: Iterable[Start]) -> Iterator[LocalBatch]:
        # Two batches ahead are enough to hide reading, and limit memory.
        waiting: queue.Queue[LocalBatch | BaseException | None] = queue.Queue(maxsize=2)
        ended = threading.Event()

        def put(item: LocalBatch | BaseException | None) -> None:
            # With a timeout: the thread must not block forever if the training loop has stopped.
            while not ended.is_set():
                with contextlib.suppress(queue.Full):
                    waiting.put(item, timeout=0.1)
                    return

        def fill() -> None:
            try:
                for start in starts:
                    if ended.is_set():
                        return
                    put(self.read(*start))
                put(None)
            except BaseException as error:  # the training loop raises it again
                put(error)

        threading.Thread(target=fill, name="reader", daemon=True).start()
        try:
            while (item := waiting.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            ended.set()
