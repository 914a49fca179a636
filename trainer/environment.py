"""Records what a run uses besides its config: packages, device, node, variables and data.

The first rank writes `environment.json` once, before the first step; `gptctl diff` compares such
files. It reads no data and no package: that would take longer than a step.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import socket
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint_names import ENVIRONMENT
from trainer.config.corpora import weights_of
from trainer.config.sections import RunConfig
from trainer.corpus.metadata import metadata_at, stem_of
from trainer.corpus.token_files import TokenFile
from trainer.data import Splits
from trainer.data.blend import Blend
from trainer.data.gpt import GPTSplit
from trainer.durable import replacing
from trainer.input_files import read_bytes
from trainer.resume import output_dir
from trainer.secret_names import looks_secret
from trainer.state import Training

MOST_PACKAGES = 2000
MOST_VARIABLES = 200
MOST_FILES = 100  # token files that are listed; the fingerprint is of all of them
LONGEST, LONGEST_NAME = 500, 100  # characters of a text, and of a name of a package or file
SMALL = 1 << 20  # bytes of a file of the system
# Variables that change how a run computes or communicates. No others: some may be secrets.
VARIABLES = (
    *("CUDA_", "CUBLAS", "CUDNN", "NVIDIA_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_", "TRITON_"),
    *(
        "OMP_",
        "GOMP_",
        "KMP_",
        "MKL_",
        "OPENBLAS_",
        "UCX_",
        "FI_",
        "RCCL_",
        "HIP_",
        "HSA_",
        "ROCR_",
    ),
    *("MALLOC_", "GLIBC_TUNABLES", "LD_", "PYTHON", "GPTCTL_SHARED_MEMORY"),
)
# torchrun sets these anew for every attempt.
OF_ATTEMPT = ("TORCHELASTIC_",)
# A package is installed with a folder of such a name. To read the files in it takes 100 ms.
_INSTALLED = re.compile(r"([^-]+)-([^-]+)(-py[\d.]+)?\.(dist|egg)-info")
_DRIVER = re.compile(rb"\b\d{3,4}\.\d[\d.]*")


def record_environment(t: Training) -> None:
    """Write what this run uses, on the first rank; a failure is only worth a warning."""
    if not t.mesh.is_first:
        return
    job, attempt = (os.environ.get(name, "") for name in ("GPTCTL_JOB", "GPTCTL_ATTEMPT"))
    facts = {
        **({"job": job, "attempt": int(attempt)} if job and attempt.isdecimal() else {}),
        "software": software(t.mesh.device),
        "node": node(t.mesh.device),
        "variables": variables(os.environ),
        "packages": packages(sys.path),
        "data": data(t.run, t.splits),
    }
    # Jobs may share an output folder, but never the folder of an attempt.
    folder = os.environ.get("GPTCTL_ATTEMPT_DIR") or output_dir(t.run)
    try:
        with replacing(Path(folder, ENVIRONMENT)) as stream:
            stream.write(json.dumps(facts, indent=1).encode() + b"\n")
    except OSError as error:
        t.log.warn(f"cannot write {ENVIRONMENT}: {error.strerror}")


def software(device: torch.device) -> dict[str, Any]:
    found = {
        "python": platform.python_version(),
        "system": platform.platform(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
    }
    if device.type == "cuda":
        found["cudnn"] = str(torch.backends.cudnn.version())
        with suppress(Exception):  # a build of torch without NCCL
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["driver"] = _driver()
    return {name: value for name, value in found.items() if value}


def _driver() -> str:
    """The version of NVIDIA's driver, as the kernel tells it."""
    found = _DRIVER.search(_system_file("/proc/driver/nvidia/version"))
    return found[0].decode() if found else ""


def node(device: torch.device) -> dict[str, Any]:
    """The node of the first rank."""
    found: dict[str, Any] = {
        "host": socket.gethostname(),
        "cpu": _cpu_model(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cpus": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }
    if device.type == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(device), "gpus": torch.cuda.device_count()}
    return found


def _cpu_model() -> str:
    text = _system_file("/proc/cpuinfo").decode(errors="replace")
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1][:LONGEST] if found else platform.machine()


def _system_file(path: str) -> bytes:
    with suppress(OSError):
        return read_bytes(path, SMALL)
    return b""


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that matter to torch and its libraries, without any that may be secret."""
    wanted = [
        name
        for name in sorted(environ)
        if name.startswith(VARIABLES) and not name.startswith(OF_ATTEMPT) and not looks_secret(name)
    ]
    # Names and values may contain bytes that are not UTF-8.
    return {_text(name): _text(environ[name]) for name in wanted[:MOST_VARIABLES]}


def _text(value: str) -> str:
    return value.encode(errors="replace").decode()[:LONGEST]


def packages(path: Iterable[str]) -> dict[str, str]:
    """The installed packages with their versions, by normalized name."""
    found: dict[str, str] = {}
    for folder in path:
        with suppress(OSError):
            for entry in sorted(os.listdir(folder or ".")):
                if installed := _INSTALLED.fullmatch(entry):
                    name = re.sub(r"[_.]+", "-", installed[1]).lower()
                    # As Python does it: the first folder that has a package wins.
                    found.setdefault(name[:LONGEST_NAME], installed[2][:LONGEST_NAME])
    return dict(sorted(found.items())[:MOST_PACKAGES])


def data(run: RunConfig, splits: Splits) -> dict[str, Any]:
    """The data, and a fingerprint of it that does not depend on where it is.

    From what the trainer knows anyway: it does not read the tokens for it.
    """
    named = {"train": splits.train, "valid": splits.valid, "test": splits.test}
    digests = {name: f"{split.digest:08x}" for name, split in named.items() if split}
    # Its text may have another name elsewhere. Token files are read in the order of their names.
    text = {"characters": splits.characters.length} if splits.characters else {}
    files = [_token_file(*each) for each in _token_files(run, splits)]
    told = json.dumps([digests["train"], text, files])
    found: dict[str, Any] = {
        "fingerprint": hashlib.sha256(told.encode()).hexdigest()[:16],
        "digests": digests,
        **text,
        "files": files[:MOST_FILES],
        "num_files": len(files),
    }
    if splits.tokenizer:
        found["tokenizer"] = splits.tokenizer.tokenizer["digest"]
    return found


def _token_files(run: RunConfig, splits: Splits) -> list[tuple[TokenFile, list[str]]]:
    """The files of all splits, each once, with the checksums that `gptctl data prepare` noted."""
    parts = [
        part
        for split in (splits.train, splits.valid, splits.test)
        for part in (split.splits if isinstance(split, Blend) else [split])
        if isinstance(part, GPTSplit)
    ]
    files = {file.prefix: file for part in parts for file in part.corpus.files}
    known: dict[Path, list[str]] = {}
    for name in ("Train", "Eval", "Test"):
        for path in weights_of(getattr(run.Data, name).dataset.input_dir):
            for each in metadata_at(path):
                for file, facts in sorted(each.files.items()):
                    sums = known.setdefault(each.file.parent / stem_of(file), [])
                    sums += [str(facts.get("sha256"))] if isinstance(facts, dict) else []
    return [(files[prefix], sorted(set(known.get(prefix, ())))) for prefix in sorted(files)]


def _token_file(file: TokenFile, checksums: list[str]) -> dict[str, Any]:
    found = {
        "name": _text(file.prefix.name),
        "documents": len(file.lengths),
        "tokens": len(file.ids),
        "dtype": file.ids.dtype.name,
    }
    if checksums:
        found["sha256"] = hashlib.sha256(" ".join(checksums).encode()).hexdigest()
    return found
