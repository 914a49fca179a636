"""Samples of max_seq_len + 1 tokens from the documents of one split of a corpus, in the order of its index maps."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from trainer.config.sections import Dataset, Model
from trainer.data.index import Cache, IndexMaps, build, require_tokens, split_bounds
from trainer.data.order import Numbers
from trainer.data.tokens import Corpus, TokenFile
from trainer.errors import UserError
from trainer.mesh import Mesh

SPLITS = ("train", "valid", "test")
GPT2_END, CPM_END = 50256, 7  # the end-of-text tokens of GPT-2's and CPM's vocabularies


def end_of_text(model: Model) -> int | None:
    """The token whose successor is not predicted. Vocabularies that are neither GPT-2's nor CPM's have none."""
    if model.name.endswith("-cn") or "-cn-" in model.name:
        return CPM_END
    return GPT2_END if (model.vocab_size or 0) > GPT2_END else None


class GPTSplit:
    def __init__(
        self, corpus: Corpus, maps: IndexMaps, seq_len: int, vocab_size: int, eos: int | None
    ) -> None:
        self.corpus, self.maps, self.seq_len, self.eos = corpus, maps, seq_len, eos
        self.vocab_size = vocab_size
        self.digest = corpus.digest
        self.size = len(maps.shuffle)

    def read(self, epochs: Numbers, numbers: Numbers) -> npt.NDArray[np.int64]:
        """The samples with these numbers: (samples, seq_len + 1) tokens. The maps already cover all epochs."""
        tokens = np.empty((len(numbers), self.seq_len + 1), np.int64)
        for row, sample in zip(tokens, self.maps.shuffle[numbers % self.size]):
            self._fill(row, *map(int, self.maps.samples[sample]))
        if (
            not 0 <= tokens.min() <= tokens.max() < self.vocab_size
        ):  # a GPU would only say that some assertion failed
            raise UserError(
                f"token ids outside of the vocabulary of {self.vocab_size}",
                "the data has changed: start anew",
            )
        return tokens

    def _fill(self, row: npt.NDArray[np.int64], position: int, offset: int) -> None:
        filled = 0
        while filled < len(row):
            part = self.corpus.read(int(self.maps.documents[position]), offset, len(row) - filled)
            row[filled : filled + len(part)] = part
            filled, position, offset = filled + len(part), position + 1, 0


def documents_of(corpus: Corpus, dataset: Dataset, name: str) -> range:
    first, last = split_bounds(dataset.split, len(corpus.lengths))[SPLITS.index(name) :][:2]
    return range(first, last)


def open_split(
    corpus: Corpus,
    dataset: Dataset,
    name: str,
    num_samples: int,
    seed: int,
    model: Model,
    mesh: Mesh,
    say: Callable[[str], None],
) -> GPTSplit | None:
    """One split, or None when it has no documents. Its maps are built once and shared through files."""
    documents = documents_of(corpus, dataset, name)
    tokens = int(corpus.lengths[documents.start : documents.stop].sum())
    if name != "train" and tokens < dataset.max_seq_len + 1:
        return None
    require_tokens(
        tokens,
        dataset.max_seq_len,
        f"the {name} split of {dataset.input_dir} ({len(documents)} documents)",
    )
    facts = {
        "split": name,
        "num_samples": num_samples,
        "seq_len": dataset.max_seq_len,
        "seed": seed,
        "documents": [documents.start, documents.stop],
        "files": [file.prefix.name for file in corpus.files],
        "lengths": corpus.digest,
    }
    cache = Cache(corpus.files[0].prefix, facts)

    def make() -> IndexMaps:
        try:
            return build(
                documents, corpus.lengths, dataset.max_seq_len, num_samples, seed % (1 << 32)
            )
        except MemoryError:
            message = f"the order of {num_samples:,} samples does not fit into memory"
            raise UserError(message, "lower Engine.max_steps, or the batch size") from None

    maps = _shared_maps(cache, make, mesh, say)
    return GPTSplit(corpus, maps, dataset.max_seq_len, model.vocab_size or 0, end_of_text(model))


def _shared_maps(
    cache: Cache, make: Callable[[], IndexMaps], mesh: Mesh, say: Callable[[str], None]
) -> IndexMaps:
    """The first rank builds what is missing while all wait; then the first of each node, if files are not shared."""
    maps = None

    def keep() -> bool:
        """Whether the files are whole by now."""
        nonlocal maps
        if cache.load(check=True) is not None:
            return True
        maps = make()
        try:
            cache.store(maps)
        except OSError as error:
            if cache.facts["split"] == "train":  # said once
                say(
                    f"index maps cannot be kept beside the data ({error.strerror}): every rank makes its own"
                )
            return False
        return True

    kept_by_first = mesh.gather(keep() if mesh.is_first else True)[0]
    builds = kept_by_first and mesh.local_rank == 0 and not mesh.is_first
    are_whole = all(mesh.gather(keep() if builds else kept_by_first))
    return (cache.load(check=False) if are_whole else None) or maps or make()


def check_vocabulary(corpus: Corpus, vocab_size: int, mesh: Mesh) -> None:
    """Every id is below the vocabulary; the ranks share the reading, and remember what they found."""
    mine = [file for number, file in enumerate(corpus.files) if number % mesh.world == mesh.rank]
    largest = [(file.prefix, _largest_id(file, vocab_size)) for file in mine]
    for prefix, token in [pair for pairs in mesh.gather(largest) for pair in pairs]:
        if not 0 <= token < vocab_size:
            hint = "the data was made with another tokenizer: set Model.vocab_size, or make it anew"
            raise UserError(
                f"{prefix}: token id {token} is outside of the vocabulary of {vocab_size}", hint
            )


def _largest_id(file: TokenFile, vocab_size: int) -> int:
    if file.ids.dtype.kind == "u" and np.iinfo(file.ids.dtype).max < vocab_size:
        return 0  # no id can be too large
    memory = file.prefix.with_name(f"{file.prefix.name}_gpt_largest_id.json")
    facts = [len(file.ids), file.changed]
    try:
        known = json.loads(memory.read_text(encoding="utf-8"))
        if known["facts"] == facts:
            return int(known["largest_id"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    largest = file.largest_id()
    with contextlib.suppress(
        OSError
    ):  # a folder that cannot be written costs a reading at every start
        memory.write_text(json.dumps({"facts": facts, "largest_id": largest}), encoding="utf-8")
    return largest
