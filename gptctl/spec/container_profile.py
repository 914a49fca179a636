"""The container of a cluster profile: its keys, and the rules about them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gptctl.spec.cluster_kinds import KINDS
from trainer.config.kinds import Words, boolean, choice, file_path, key
from trainer.config.record import record
from trainer.errors import Finding, Rule

RUNTIME = Rule(
    "P006",
    "the cluster must support the container runtime: pyxis is a plugin of Slurm",
    uses=("kind", "container.runtime"),
)
PYXIS_FORM = Rule(
    "P007",
    "image and binds must have the form that pyxis reads",
    uses=("container.runtime", "container.image", "container.binds"),
)

PYXIS = "pyxis"
# SRC[:DST[:FLAGS]], where pyxis separates flags by +.
_PYXIS_BIND = re.compile(r"[^,:\s]+(:[^,:\s]+(:[a-z=+]+)?)?")


@record(frozen=True)
class Container:
    """The container in which the ranks run; gptctl's engine stays outside of it."""

    runtime: str | None = choice(
        None,
        ["singularity", "apptainer", PYXIS],
        "singularity | apptainer | pyxis (Slurm's plugin for enroot); empty: apptainer",
    )
    image: str | None = file_path(
        None, "image file, with pyxis also REGISTRY#IMAGE:TAG; empty: no container"
    )
    binds: tuple[str, ...] = key(Words(), (), "bind mounts: HOST:CONTAINER[:rw]")
    pwd: str | None = file_path(None, "working folder inside the container")
    nv: bool = boolean(True, "make the GPUs visible in the container (--nv); not for pyxis")


def check_container(container: Container, kind: str) -> Iterator[Finding]:
    supporting = [name for name, each in KINDS.items() if container.runtime in each.runtimes]
    if supporting and kind not in supporting:
        message = f"a cluster of kind {kind} cannot run containers with {container.runtime}"
        hint = f"use apptainer or singularity, or set kind: {' or '.join(supporting)}"
        yield RUNTIME.found("container.runtime", container.runtime, message, hint)
    elif container.runtime == PYXIS:
        yield from _check_pyxis(container)


def _check_pyxis(container: Container) -> Iterator[Finding]:
    for bind in container.binds:
        if not _PYXIS_BIND.fullmatch(bind):
            message = f"{bind} is not a mount that pyxis can read"
            hint = "use SRC:DST or SRC:DST:ro+rprivate, without commas and spaces, one per entry"
            yield PYXIS_FORM.found("container.binds", bind, message, hint)
    image = container.image or ""
    # Without a / or . at its start, pyxis takes it for the name of an image in a registry.
    if image.endswith((".sqsh", ".sif", ".squashfs")) and not image.startswith(("/", "~/")):
        message = f"pyxis would look for {image} in a registry"
        yield PYXIS_FORM.found("container.image", image, message, "use an absolute path")
    elif image.endswith(".sif"):
        message = f"{image} is an image of Singularity or Apptainer"
        hint = "use runtime: apptainer, or make a .sqsh file with enroot import"
        yield PYXIS_FORM.found("container.image", image, message, hint)
