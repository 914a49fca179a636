"""The words that run the ranks in a container. Pure; knows nothing of what is in the image.

Singularity and Apptainer start the container for torchrun alone, inside launch.sh. pyxis is a
plugin of Slurm: srun itself starts the container, so everything that srun starts runs inside it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from gptctl.spec.container_profile import PYXIS, Container

# pyxis separates mounts by commas and their parts by colons; enroot separates words by spaces.
NOT_MOUNTABLE = re.compile(r"[,:\s]")


def command_words(container: Container, run_dir: str) -> tuple[str, ...]:
    """The words before the command of a node; none if srun starts the container."""
    if not container.image or container.runtime == PYXIS:
        return ()
    # The job's folder must be visible inside: code, config and logs are there.
    binds = [*container.binds, *([run_dir] if run_dir else [])]
    words = [container.runtime or "apptainer", "exec", *(["--nv"] if container.nv else [])]
    words += ["--pwd", container.pwd] if container.pwd else []
    words += [word for bind in binds for word in ("-B", bind)]
    return (*words, container.image)


def srun_options(container: Container, folders: Iterable[str], start_in: str) -> tuple[str, ...]:
    """The options with which srun starts a container that sees these folders at the same paths."""
    if not container.image or container.runtime != PYXIS:
        return ()
    # The root folder of the container cannot be replaced by a mount.
    own = [f"{folder}:{folder}" for folder in dict.fromkeys(folders) if folder not in ("", "/")]
    mounts = ",".join(dict.fromkeys([*container.binds, *own]))
    work_dir = container.pwd or start_in
    return (
        f"--container-image={os.path.expanduser(container.image)}",
        *([f"--container-mounts={mounts}"] if mounts else []),
        *([f"--container-workdir={work_dir}"] if work_dir else []),
    )


def setup_inside(setup: Iterable[str]) -> str:
    """The setup as shell code for `bash -c`, in front of the command that a container runs."""
    return "".join(f"{{\n{line}\n}} || exit 78\n" for line in setup)
