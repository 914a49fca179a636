"""Samples of max_seq_len + 1 tokens from one split of a corpus, in the order of its index maps."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from trainer.cache_folder import WHERE_TO_WRITE, cache_folders
from trainer.config.sections import Dataset, Model
from trainer.corpus.token_files import Corpus, TokenFile
from trainer.data.index import Cache, IndexMaps, build, require_tokens, split_bounds
from trainer.data.order import Numbers
from trainer.durable import replacing
from trainer.errors import UserError
from trainer.input_files import read_object
from trainer.mesh import Mesh

SPLITS = ("train", "valid", "test")


class GPTSplit:
    covers_epochs = True

    def __init__(
        self, corpus: Corpus, maps: IndexMaps, seq_len: int, vocab_size: int, eos: int | None
    ) -> None:
        self.corpus, self.maps, self.seq_len, self.eos = corpus, maps, seq_len, eos
        self.vocab_size = vocab_size
        self.digest = corpus.digest
        self.size = len(maps.shuffle)

    def read(self, epochs: Numbers, numbers: Numbers) -> npt.NDArray[np.int64]:
        """The samples with these numbers: (samples, seq_len + 1) tokens.

        The epochs do not matter, because the maps already cover all of them.
        """
        tokens = np.empty((len(numbers), self.seq_len + 1), np.int64)
        for row, sample in zip(tokens, self.maps.shuffle[numbers % self.size]):
            self._fill(row, *map(int, self.maps.samples[sample]))
        # Checked here, because on a GPU it would be an assertion without any explanation.
        if not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            raise UserError(
                f"token ids outside the vocabulary of {self.vocab_size}",
                "the data changed while the job was running: start it again",
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
    path: str,
    dataset: Dataset,
    name: str,
    num_samples: int,
    seed: int,
    model: Model,
    mesh: Mesh,
    cache_dir: str | None,
    warn: Callable[[str], None],
) -> GPTSplit | None:
    """Open one split; None if it is too small for a sample and not the train split.

    Its index maps are built once and shared through files.
    """
    documents = documents_of(corpus, dataset, name)
    tokens = int(corpus.lengths[documents.start : documents.stop].sum())
    if name != "train" and tokens < dataset.max_seq_len + 1:
        return None
    require_tokens(
        tokens,
        dataset.max_seq_len,
        f"the {name} split of {path} ({len(documents)} documents)",
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
    # Named after the first file, as in FleetX; `facts` list everything that the maps depend on.
    prefix = corpus.files[0].prefix
    caches = [
        Cache(folder / prefix.name, facts) for folder in cache_folders(prefix.parent, cache_dir)
    ]

    def make() -> IndexMaps:
        try:
            return build(
                documents, corpus.lengths, dataset.max_seq_len, num_samples, seed % (1 << 32)
            )
        except MemoryError:
            message = f"the index of {num_samples:,} samples does not fit into memory"
            raise UserError(message, "reduce Engine.max_steps or the batch size") from None

    maps = _shared_maps(caches, make, mesh, warn)
    eos = None if dataset.eos_id == -1 else dataset.eos_id
    return GPTSplit(corpus, maps, dataset.max_seq_len, model.vocab_size or 0, eos)


def _shared_maps(
    caches: Sequence[Cache], make: Callable[[], IndexMaps], mesh: Mesh, warn: Callable[[str], None]
) -> IndexMaps:
    """Load the maps, or build missing ones while the other ranks wait.

    The first rank builds them; then the first rank of each node, if nodes do not share the files.
    All ranks of a node map the same files into memory: they are never copied per rank.
    """
    # 1. The first rank makes sure that the files exist; the others wait for its result.
    first = mesh.gather(_stored(caches, make, warn) if mesh.is_first else None)[0]
    # 2. On a shared file system, the first ranks of other nodes find them; else they build them.
    builds = isinstance(first, int) and mesh.local_rank == 0 and not mesh.is_first
    stored = mesh.gather(_stored(caches, make, warn) if builds else first)
    if failed := next((result for result in stored if isinstance(result, str)), None):
        raise UserError(f"cannot save index maps: {failed}", WHERE_TO_WRITE)
    # 3. Everybody maps the files of its node. They can be missing if another job, with another
    # seed or another split, replaces them right now.
    maps = caches[stored[mesh.rank - mesh.local_rank]].load(check=False)
    return make() if maps is None else maps


def _stored(
    caches: Sequence[Cache], make: Callable[[], IndexMaps], warn: Callable[[str], None]
) -> int | str:
    """The number of the first cache that has the maps, if necessary built now; or what failed."""
    for number, cache in enumerate(caches):
        if cache.load(check=True) is not None:
            return number
    maps, failures = make(), []
    for number, cache in enumerate(caches):
        try:
            cache.store(maps)
        except OSError as error:
            failures.append(f"{cache.folder} ({error.strerror})")
            continue
        if failures and cache.facts["split"] == "train":  # say it only once
            warn(f"cannot write to {failures[0]}: index maps are saved in {cache.folder}")
        return number
    return ", ".join(failures)


def check_vocabulary(
    corpus: Corpus, vocab_size: int, mesh: Mesh, cache_dir: str | None = None
) -> None:
    """Check that every token id is in the vocabulary.

    Ranks share the reading, and the result is stored, because reading a large corpus takes minutes.
    """
    mine = [file for number, file in enumerate(corpus.files) if number % mesh.world == mesh.rank]
    largest = [(str(file.prefix), _largest_id(file, vocab_size, cache_dir)) for file in mine]
    for prefix, token in [pair for pairs in mesh.gather(largest) for pair in pairs]:
        if not 0 <= token < vocab_size:  # negative ids would index from the end of the embedding
            hint = (
                "the data comes from another tokenizer: set Model.vocab_size, "
                "or tokenize the text again"
            )
            raise UserError(
                f"{prefix}: token id {token} is outside the vocabulary of {vocab_size}", hint
            )


def _largest_id(file: TokenFile, vocab_size: int, cache_dir: str | None) -> int:
    if file.ids.dtype.kind == "u" and np.iinfo(file.ids.dtype).max < vocab_size:
        return 0  # this dtype cannot hold an id that is too large
    folders = cache_folders(file.prefix.parent, cache_dir)
    known = [folder / f"{file.prefix.name}_gpt_largest_id.json" for folder in folders]
    facts = [len(file.ids), file.changed]  # if one of them differs, the stored result is outdated
    for memory in known:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            stored = read_object(memory)
            if stored["facts"] == facts:
                return int(stored["largest_id"])
    largest = file.largest_id()
    for memory in known:
        with contextlib.suppress(OSError):  # if no folder works, every start reads the data again
            memory.parent.mkdir(parents=True, exist_ok=True)
            with replacing(memory) as stream:
                stream.write(json.dumps({"facts": facts, "largest_id": largest}).encode())
            break
    return largest
