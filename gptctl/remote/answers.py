"""What a host must answer. A host may be broken or hostile, so nothing else is ever used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gptctl.engine.file_reading import is_whole
from gptctl.engine.job_result import FINAL
from gptctl.engine.run_folder import ABANDONED

LONGEST_NAME = 256  # characters of a host name, an address or a boot id


def is_answer(command: str, answer: Mapping[str, Any]) -> bool:
    """Whether this can be the answer to a command of `engine/host_commands.py`."""
    match command, answer:
        case "status", {"agents": list(), "processes": int(), "boot": str(), "result": result}:
            return result is None or _is_result(result)
        case "end", {"left": list(left)}:
            return all(isinstance(pid, int) for pid in left)
        case "abandon", {"claim": claim}:
            return claim == ABANDONED or _is_process(claim)
    return False


def is_endpoint(value: object) -> bool:
    """Whether this is where an agent listens for others: an address and a port, 0 if nowhere."""
    match value:
        case [address, port]:
            return _is_name(address) and is_whole(port, 0, 1 << 16)
    return False


def is_commit(message: Mapping[str, Any]) -> bool:
    """Whether this is how the agent of the first host confirms that it runs the job."""
    match message:
        case {"committed": process, "endpoint": [host, port]}:
            # A job that waits has no port yet.
            is_place = _is_name(host) and (port is None or is_whole(port, 1, 1 << 16))
            is_reason = isinstance(message.get("waiting", ""), str)
            return is_place and is_reason and _is_process(process)
    return False


def handle_of(process: Mapping[str, Any], host: str) -> dict[str, Any]:
    """What is recorded of the agent that runs a job: nothing else that its host may have sent."""
    return {**{name: process.get(name) for name in ("pid", "started", "boot")}, "host": host}


def _is_process(value: object) -> bool:
    match value:
        case {"pid": pid, "host": host, "boot": boot, **others}:
            started = others.get("started")
            is_moment = started is None or is_whole(started, 0, 1 << 63)
            return is_whole(pid, 1, 1 << 31) and is_moment and _is_name(host) and _is_name(boot)
    return False


def _is_name(value: object) -> bool:
    return isinstance(value, str) and len(value) < LONGEST_NAME


def _is_result(value: object) -> bool:
    match value:
        case [str(state), str(), *_]:
            return state in FINAL
    return False
