"""The verbs for data as jobs: what is refused before anything is submitted, and what then runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gptctl.cli.session import Session
from gptctl.cli.task_words import absolute, option_words
from gptctl.cli.tasks import TaskCommand, is_job, run_task
from trainer.errors import WRONG_USAGE, UserError, closest

LAYOUT = ("nodes", "gpus_per_node", "devices")
ONE_PROCESS = "omit it: one process uses all cores of one node, and no GPU"


class DataCommand(TaskCommand):
    """A verb that may run as a job of one process."""

    refused = (*TaskCommand.refused, *LAYOUT)


def runs_as_job(typed: dict[str, Any]) -> bool:
    """Whether a verb is to run as a job. Raises UserError for options without a meaning for it."""
    for name in LAYOUT:
        flag = f"--{name.replace('_', '-')}"
        _refuse_layout(name, typed[name], f"{flag} {typed[name]}")
    for text in typed["overrides"]:
        _check_override(text)
    return is_job(typed)


def _refuse_layout(name: str, value: str | None, typed: str) -> None:
    is_one = name != "devices" and value == "1"
    if name in LAYOUT and value is not None and not is_one:
        raise UserError(f"{typed}: work on data has no layout", ONE_PROCESS, WRONG_USAGE)


def _check_override(text: str) -> None:
    from gptctl.spec.launch import Launch
    from trainer.config import Override
    from trainer.config.read import paths_of

    override = Override.parse(text)
    section, _, name = override.key.partition(".")
    if section == "Launch":
        _refuse_layout(
            name, override.value if isinstance(override.value, str) else "", f"-o {text}"
        )
        return
    known = {path: path for path in paths_of(Launch, "Launch")}
    known = {path.removeprefix("Launch."): path for path in known} | known
    near = closest(override.key, known)
    hint = "only keys of Launch apply, such as Launch.slurm.time"
    hint = f"did you mean {known[near[0]]}?" if near else hint
    raise UserError(f"-o {text}: data reads no run config", hint, WRONG_USAGE)


def run_as_job(
    session: Session,
    program: str,
    arguments: dict[str, Any],
    typed: dict[str, Any],
    check: Callable[[], None],
) -> int:
    """Run a program of the trainer with these arguments, on the cluster that was asked for.

    `check` raises UserError if its files are not as they have to be.
    """
    inputs = [absolute(each) for each in arguments.pop("inputs")]
    arguments["format"] = arguments.pop("input_format")
    arguments["output"] = absolute(arguments["output"])
    words = option_words(**arguments, json=typed["as_json"])
    # A job that waits for others may need what they write.
    waits = typed["queue"] or any(
        each.startswith("dependency=") for each in typed["sbatch_options"]
    )

    def check_here(sees_files: bool) -> None:
        if sees_files and not waits:
            with _as_usage():
                check()

    return run_task(session, "data", program, words, typed, inputs, check_here)


@contextmanager
def _as_usage() -> Iterator[None]:
    """Before anything starts, every mistake is one of the command line."""
    try:
        yield
    except UserError as error:
        raise UserError(error.message, error.hint, WRONG_USAGE, error.findings) from None
