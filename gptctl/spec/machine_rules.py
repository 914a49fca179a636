"""Check a local job against this machine: its GPUs and its cores.

Not part of `check_config`: whether a config is valid does not depend on the machine where it is
checked. Large ones are checked on laptops.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptctl.engine.addresses import APPRISE
from gptctl.spec.check import Checked
from gptctl.spec.visible_gpus import count_visible_gpus
from gptctl.text import count
from trainer.cache_folder import WHERE_TO_WRITE, cache_folders, can_write
from trainer.config.corpora import weights_of
from trainer.errors import Finding, Rule, UserError, install_line
from trainer.trackers import INSTALL, PACKAGES, missing_packages

if TYPE_CHECKING:
    from trainer.corpus.metadata import Metadata

HAS_GPU = Rule(
    "S016", "the bundled trainer on this machine with device: gpu needs a GPU here", "notice"
)
CROWDED = Rule(
    "S017", "a job on CPUs of this machine should have at most four ranks per core", "warning"
)
CACHE = Rule("S019", "index maps need a folder that the job can write to", "warning")
TOKENIZER = Rule("S030", "prepared data must come from one tokenizer that fits Model.vocab_size")
END_TOKEN = Rule("S031", "eos_id should be the end token of prepared data", "warning")
APPRISE_HERE = Rule(
    "S032", "apprise must be installed to notify by mail and other services", "warning"
)
ADDRESS_HERE = Rule(
    "S033", "the address of a notification should be readable where it is sent", "warning"
)
TRACKER = Rule("S040", "the trackers of a run need their packages", "warning")
NO_GPU_HERE = "this machine has no GPU that a job may use"
RANKS_PER_CORE = 4
# ROCm and WSL have no /dev/nvidia0: their GPUs cannot be counted here, but torch may find them.
OTHER_DRIVERS = ("/dev/kfd", "/dev/dxg")


def check_gpus_here(checked: Checked) -> Iterator[Finding]:
    """Find out if a job needs a GPU that this machine lacks: `submit` refuses it."""
    # A user's own script decides itself where it runs.
    is_trainer = checked.resolved is not None and checked.launch.entrypoint == "trainer"
    if not is_trainer or not checked.cluster.traits.is_one_machine or checked.device != "gpu":
        return
    if not has_gpu():
        message = f"{NO_GPU_HERE}, so gptctl submit refuses it here"
        hint = "choose a cluster with GPUs (--cluster NAME), or -o Global.device=cpu"
        yield HAS_GPU.found("Global.device", "gpu", message, hint)


def has_gpu() -> bool:
    if count_visible_gpus():
        return True
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") is not None
    return not is_hidden and any(Path(driver).exists() for driver in OTHER_DRIVERS)


def check_trackers_here(checked: Checked, python: str = sys.executable) -> Iterator[Finding]:
    """Warn of trackers that would be off, if the ranks run on this machine with this interpreter.

    Without a `python`, that of the profile is meant.
    """
    cluster, is_trainer = checked.cluster, checked.launch.entrypoint == "trainer"
    comes_later = cluster.setup or cluster.container.image
    is_ours = (cluster.python or python) == sys.executable and not comes_later
    if not is_trainer or checked.resolved is None or not cluster.traits.is_one_machine:
        return
    if not is_ours:  # another interpreter has other packages: the log of the job tells
        return
    names = checked.resolved.run.Engine.trackers
    if missing := missing_packages(names) if names else []:
        lacking = ", ".join(f"{PACKAGES[name]} (for {name})" for name in missing)
        message = f"not installed here: {lacking}; the run would be trained without"
        yield TRACKER.found("Engine.trackers", ", ".join(missing), message, INSTALL)


def check_cores_here(checked: Checked) -> Iterator[Finding]:
    """Warn if the ranks of a local job on CPUs would mostly wait for each other."""
    ranks, cores = checked.machines.world, len(os.sched_getaffinity(0))
    on_cpus = checked.cluster.traits.is_one_machine and checked.device == "cpu"
    if on_cpus and ranks > RANKS_PER_CORE * cores:
        message = f"{count(ranks, 'rank')} on {count(cores, 'core')} of this machine"
        most = RANKS_PER_CORE * cores
        hint = f"use at most {most} ranks: every step waits for the slowest of them"
        yield CROWDED.found("Launch.gpus_per_node", checked.machines.per_node, message, hint)


def check_cache_here(checked: Checked, folder: str = ".") -> Iterator[Finding]:
    """Warn if a local job could save its index maps nowhere; it starts only if they exist."""
    is_trainer = checked.resolved is not None and checked.launch.entrypoint == "trainer"
    if not is_trainer or not checked.cluster.traits.is_one_machine or checked.resolved is None:
        return
    data, seen = checked.resolved.run.Data, set()
    cache_dir = str(Path(folder, data.cache_dir)) if data.cache_dir else None
    for path in _token_paths(checked, folder):
        if path in seen or not os.path.exists(path):
            continue
        seen.add(path)
        folders = cache_folders(path if path.is_dir() else path.parent, cache_dir)
        if not any(map(can_write, folders)):
            message = f"cannot write index maps to {' or '.join(map(str, folders))}"
            yield CACHE.found("Data.cache_dir", data.cache_dir, message, WHERE_TO_WRITE)


def _token_paths(checked: Checked, folder: str) -> list[Path]:
    """Where the token files of a run are, relative paths from this folder."""
    assert checked.resolved is not None
    data = checked.resolved.run.Data
    sets = [part.dataset for part in (data.Train, data.Eval, data.Test)]
    paths = [weights_of(each.input_dir) for each in sets if each.name == "GPTDataset"]
    return [*dict.fromkeys(Path(folder, path) for one in paths for path in one)]


def check_data_here(checked: Checked, folder: str = ".") -> Iterator[Finding]:
    """Compare the config with what `gptctl data prepare` recorded, if it can be seen here."""
    for finding in _check_data(checked, folder):
        yield finding.at(checked.place_of(finding.key))


def _check_data(checked: Checked, folder: str) -> Iterator[Finding]:
    is_trainer = checked.resolved is not None and checked.launch.entrypoint == "trainer"
    if not is_trainer or checked.resolved is None or not checked.cluster.sees_files:
        return
    key, train = "Data.Train.dataset.input_dir", checked.resolved.run.Data.Train.dataset
    try:
        metadata = prepared_with(checked, folder)
    except UserError as error:
        yield TOKENIZER.found(key, train.input_dir, error.message, error.hint)
        return
    if metadata is not None:
        yield from _check_tokenizer(checked, metadata)


def prepared_with(checked: Checked, folder: str) -> Metadata | None:
    """What is known of the tokenizer of prepared data. Raises UserError if there are several."""
    paths = _token_paths(checked, folder)
    if not paths:
        return None
    # Here: most checks of a config see no prepared data.
    from trainer.corpus.metadata import common_tokenizer, metadata_at

    return common_tokenizer(each for path in paths for each in metadata_at(path))


def _check_tokenizer(checked: Checked, metadata: Metadata) -> Iterator[Finding]:
    assert checked.resolved is not None
    model, train = checked.resolved.run.Model, checked.resolved.run.Data.Train.dataset
    from trainer.corpus.metadata import misfit

    if problem := misfit(metadata, model.vocab_size or 0):
        yield TOKENIZER.found("Model.vocab_size", model.vocab_size, *problem)
        return
    # None: the trainer takes the token of the data. -1: nothing is masked, on purpose.
    if train.eos_id not in (None, -1, metadata.eos_id) and metadata.eos_id is not None:
        message = f"token {train.eos_id}, but documents of {metadata.file} end with another one"
        hint = f"set Data.Train.dataset.eos_id: {metadata.eos_id}"
        yield END_TOKEN.found("Data.Train.dataset.eos_id", train.eos_id, message, hint)


def check_apprise_here(checked: Checked) -> Iterator[Finding]:
    """Warn if neither this gptctl nor, probably, the engine can use the addresses of apprise."""
    targets = [target for target in checked.launch.notify or () if _kind_here(target) == APPRISE]
    if targets and importlib.util.find_spec("apprise") is None:
        message = "notify has an address for apprise, which is not installed here"
        yield APPRISE_HERE.found("Launch.notify", None, message, install_line("notify"))


def check_addresses_here(targets: Iterable[Mapping[str, Any]]) -> Iterator[Finding]:
    """Warn about references that cannot be read here: a job inherits this environment."""
    targets = list(targets)
    if not targets:  # as in most jobs, which then need not import this
        return
    from gptctl.engine.address_reading import UnusableAddress, read_address

    for target in targets:
        try:
            read_address(target, os.environ)
        except UnusableAddress as problem:
            hint = "fix it, and try it with gptctl notify test"
            yield ADDRESS_HERE.found("Launch.notify", None, str(problem), hint)


def _kind_here(target: Mapping[str, Any]) -> str:
    """The kind of an address, which may follow from a URL that is named, not written."""
    from gptctl.engine.address_reading import UnusableAddress, read_address

    try:
        return read_address(target, os.environ).kind
    except UnusableAddress:
        return str(target["kind"])
