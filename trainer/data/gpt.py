"""Samples of max_seq_len + 1 tokens from one split of a corpus, in the order of its index maps."""

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
    """The token after which nothing is predicted, for the vocabularies of GPT-2 and CPM."""
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
    dataset: Dataset,
    name: str,
    num_samples: int,
    seed: int,
    model: Model,
    mesh: Mesh,
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
    # Named after the first file, as in FleetX; `facts` list everything that the maps depend on.
    cache = Cache(corpus.files[0].prefix, facts)

    def make() -> IndexMaps:
        try:
            return build(
                documents, corpus.lengths, dataset.max_seq_len, num_samples, seed % (1 << 32)
            )
        except MemoryError:
            message = f"the index of {num_samples:,} samples does not fit into memory"
            raise UserError(message, "reduce Engine.max_steps or the batch size") from None

    maps = _shared_maps(cache, make, mesh, warn)
    return GPTSplit(corpus, maps, dataset.max_seq_len, model.vocab_size or 0, end_of_text(model))


def _shared_maps(
    cache: Cache, make: Callable[[], IndexMaps], mesh: Mesh, warn: Callable[[str], None]
) -> IndexMaps:
    """Load the maps, or build missing ones while the other ranks wait.

    The first rank builds them; then the first rank of each node, if nodes do not share the files.
    """
    maps = None

    def keep() -> bool:
        """Make sure that the files exist; False if they cannot be written."""
        nonlocal maps
        if cache.load(check=True) is not None:
            return True
        maps = make()
        try:
            cache.store(maps)
        except OSError as error:
            if cache.facts["split"] == "train":  # warn only once
                warn(
                    f"cannot save index maps next to the data ({error.strerror}): "
                    "every rank builds its own, at every start"
                )
            return False
        return True

    # 1. The first rank makes sure that the files exist; the others wait for its result.
    kept_by_first = mesh.gather(keep() if mesh.is_first else True)[0]
    # 2. On a shared file system, the first ranks of other nodes find them; else they build them.
    builds = kept_by_first and mesh.local_rank == 0 and not mesh.is_first
    are_whole = all(mesh.gather(keep() if builds else kept_by_first))
    # 3. Everybody maps the same files into memory, or builds the maps in its own memory.
    return (cache.load(check=False) if are_whole else None) or maps or make()


def check_vocabulary(corpus: Corpus, vocab_size: int, mesh: Mesh) -> None:
    """Check that every token id is in the vocabulary.

    Ranks share the reading, and the result is stored, because reading a large corpus takes minutes.
    """
    mine = [file for number, file in enumerate(corpus.files) if number % mesh.world == mesh.rank]
    largest = [(file.prefix, _largest_id(file, vocab_size)) for file in mine]
    for prefix, token in [pair for pairs in mesh.gather(largest) for pair in pairs]:
        if not 0 <= token < vocab_size:  # negative ids would index from the end of the embedding
            hint = (
                "the data comes from another tokenizer: set Model.vocab_size, "
                "or tokenize the text again"
            )
            raise UserError(
                f"{prefix}: token id {token} is outside the vocabulary of {vocab_size}", hint
            )


def _largest_id(file: TokenFile, vocab_size: int) -> int:
    if file.ids.dtype.kind == "u" and np.iinfo(file.ids.dtype).max < vocab_size:
        return 0  # this dtype cannot hold an id that is too large
    memory = file.prefix.with_name(f"{file.prefix.name}_gpt_largest_id.json")
    facts = [len(file.ids), file.changed]  # if one of them differs, the stored result is outdated
    try:
        known = json.loads(memory.read_text(encoding="utf-8"))
        if known["facts"] == facts:
            return int(known["largest_id"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    largest = file.largest_id()
    with contextlib.suppress(OSError):  # in a read-only folder, every start reads the data again
        memory.write_text(json.dumps({"facts": facts, "largest_id": largest}), encoding="utf-8")
    return largest
