"""What `shell`, `stacks` and `forward` share: a running job, one of its nodes, its engine."""

from __future__ import annotations

import subprocess
import zipfile
from collections.abc import Sequence
from typing import Any

from gptctl.backends import Backend, JobState
from gptctl.engine.contract import ENGINE_FILE
from gptctl.engine.file_reading import load_value
from gptctl.engine.job_result import PENDING, RUNNING, UNKNOWN
from gptctl.engine.processes import clean_environment
from gptctl.jobs.store import JobRecord
from gptctl.remote.parallel import in_parallel
from trainer.errors import ANSWER_IS_NO, OUT_OF_REACH, WRONG_USAGE, UserError

STACKS_TIMEOUT = 60.0  # seconds for all ranks of a node, with the time to connect


def require_running(record: JobRecord, state: JobState) -> None:
    if state.state == RUNNING:
        return
    if state.state == UNKNOWN:
        raise UserError(f"{record.id}: {state}", "try again later", OUT_OF_REACH)
    what = "has not started yet" if state.state == PENDING else "is not running any more"
    hint = f"gptctl logs {record.id} shows what it wrote"
    if not record.run_folder.is_dir():
        hint = "`gptctl list` shows the jobs that run"
    if state.state == PENDING:
        hint = f"wait for it: gptctl logs {record.id} -f"
    raise UserError(f"{record.id} {what}: {state}", hint, ANSWER_IS_NO)


def require_node(record: JobRecord, node: int) -> None:
    if not 0 <= node < record.nodes:
        known = "only node 0" if record.nodes == 1 else f"nodes 0 to {record.nodes - 1}"
        message = f"there is no node {node}: {record.id} has {known}"
        raise UserError(message, f"see `gptctl status {record.id}`", WRONG_USAGE)


def require_module(record: JobRecord, module: str) -> None:
    """Check the engine that was frozen with the job: an older one cannot do this."""
    try:
        with zipfile.ZipFile(record.run_folder / ENGINE_FILE) as engine:
            names = engine.namelist()
    except (OSError, zipfile.BadZipFile) as error:
        message = f"the engine of {record.id} cannot be read: {error}"
        raise UserError(message, f"see {record.local_dir}", OUT_OF_REACH) from None
    if f"gptctl/engine/{module}.py" not in names:
        message = f"{record.id} was submitted by an older gptctl, whose engine cannot do this"
        raise UserError(message, "submit the job again", ANSWER_IS_NO)


def forwarded_ports(text: str) -> tuple[int, int | None]:
    """Parse PORT or PORT:LOCAL; both must be ports that a program can listen on."""
    there, separator, here = text.partition(":")
    words = [there, *([here] if separator else [])]
    ports = [int(word) if _is_port(word) else 0 for word in words]
    if not all(0 < port < 65536 for port in ports):
        message = f"{text} is not PORT or PORT:LOCAL"
        raise UserError(message, "use ports from 1 to 65535, such as 6006:16006", WRONG_USAGE)
    return ports[0], ports[1] if separator else None


def _is_port(word: str) -> bool:
    return word.isascii() and word.isdecimal() and len(word) < 6


def collect_stacks(backend: Backend, record: JobRecord, rank: int | None) -> dict[str, Any]:
    """Ask every node for the stacks of its ranks; name nodes and ranks that do not answer."""
    only = [] if rank is None else [str(rank)]

    def ask(node: int) -> list[dict[str, Any]]:
        words = ["stacks", str(node), *only]
        return _ranks_of(backend.node_command(record, node, words, has_terminal=False))

    answers = in_parallel(ask, range(record.nodes))
    found = [each for answer in answers if not isinstance(answer, Exception) for each in answer]
    failed = {node: each for node, each in enumerate(answers) if isinstance(each, Exception)}
    ranks = {each["rank"]: each for each in found}
    wanted = [number for number in range(record.world) if rank in (None, number)]
    absent = [number for number in wanted if number not in ranks]
    # Of a node that does not answer nothing is known.
    unknown = {number for number in absent if number // record.per_node in failed}
    return {
        "job": record.id,
        "ranks": [ranks[number] for number in sorted(ranks)],
        "missing": [number for number in absent if number not in unknown],
        "nodes": [_node_problem(record, node, error) for node, error in failed.items()],
    }


def _node_problem(record: JobRecord, node: int, error: Exception) -> dict[str, Any]:
    first = node * record.per_node
    ranks = [number for number in range(first, first + record.per_node) if number < record.world]
    return {"node": node, "ranks": ranks, "problem": str(error)}


def _ranks_of(command: Sequence[str]) -> list[dict[str, Any]]:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=clean_environment(),
            timeout=STACKS_TIMEOUT,
        )
    except FileNotFoundError:
        raise UserError(f"{command[0]} is not installed here", "", OUT_OF_REACH) from None
    except subprocess.TimeoutExpired:
        raise UserError(f"no answer in {STACKS_TIMEOUT:.0f} s", "", OUT_OF_REACH) from None
    # A login shell may have printed something before the answer.
    answer = done.stdout.decode(errors="replace").strip().rpartition("\n")[2]
    try:
        return [_checked(each) for each in load_value(answer)["ranks"]]
    # A host may be broken: what it says is only shown.
    except (ValueError, LookupError, TypeError):
        message = stderr_text(done.stderr) or f"{command[0]} exited with code {done.returncode}"
        raise UserError(message, "", OUT_OF_REACH) from None


def stderr_text(stderr: bytes) -> str:
    """What ssh, srun or a script printed, in one line: the cause is often not the last one."""
    lines = [line.strip() for line in stderr.decode(errors="replace").splitlines()]
    return "; ".join(line.removeprefix("error: ") for line in dict.fromkeys(lines) if line)[:400]


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    """Take only what has the right type; raise an error otherwise."""
    texts = {name: str(answer[name]) for name in ("host", "source", "problem")}
    numbers = {name: int(answer[name]) for name in ("rank", "node", "pid")}
    threads = [
        {
            "name": str(thread["name"]),
            "is_main": bool(thread["is_main"]),
            "frames": [[str(file), int(line), str(name)] for file, line, name in thread["frames"]],
        }
        for thread in answer["threads"]
    ]
    return {**numbers, **texts, "threads": threads}
