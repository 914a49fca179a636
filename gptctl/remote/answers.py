"""What a host must answer. A host may be broken or hostile, so nothing else is ever used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gptctl.engine.job_result import FINAL


def is_answer(command: str, answer: Mapping[str, Any]) -> bool:
    """Whether this can be the answer to a command of `engine/host_commands.py`."""
    match command, answer:
        case "status", {"agents": list(), "processes": int(), "boot": str(), "result": result}:
            return result is None or _is_result(result)
        case "end", {"left": list(left)}:
            return all(isinstance(pid, int) for pid in left)
        case "abandon", {"claim": claim}:
            return claim == {"abandoned": True} or _is_process(claim)
    return False


def is_endpoint(value: object) -> bool:
    """Whether this is where an agent listens for others: an address and a port, 0 if nowhere."""
    match value:
        case [str(address), int(port)]:
            return len(address) < 256 and not isinstance(port, bool) and 0 <= port < 1 << 16
    return False


def is_commit(message: Mapping[str, Any]) -> bool:
    """Whether this is how the agent of the first host confirms that it runs the job."""
    match message:
        # A job that waits has no port yet.
        case {"committed": process, "endpoint": [str(), int() | None]}:
            return _is_process(process) and isinstance(message.get("waiting", ""), str)
    return False


def _is_process(value: object) -> bool:
    match value:
        case {"pid": int(), "host": str(), "boot": str()}:
            return True
    return False


def _is_result(value: object) -> bool:
    match value:
        case [str(state), str(), *_]:
            return state in FINAL
    return False
