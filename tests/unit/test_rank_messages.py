"""What strangers write where ranks exchange messages. Oracles: a file that a pickle would create, and the messages of ranks."""

from __future__ import annotations

import json
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from trainer.mesh import LARGEST_MESSAGE, gather_json
from trainer.watchdog import channel as channel_module
from trainer.watchdog.channel import Channel
from trainer.watchdog.verdicts import Answer, Verdict, answer_in, verdict_in

WORLD = 2
ANSWER = Answer(1, 5, "step 5", 0.5, False)._asdict()
VERDICT = Verdict("why", "what to do", [1])._asdict()


class Trap:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.file),)


def hostile(trap: Path) -> list[bytes]:
    return [pickle.dumps(Trap(trap)), b"", b"\xff\0", b"[1]", b"[" * 100_000, b'{"a": NaN}', b"9" * 5000]


def peer(monkeypatch: pytest.MonkeyPatch, data: bytes, size: int | None = None) -> None:
    """In the place of torch's collective: the other rank sends these bytes. No honest rank can be made to."""

    def all_gather(into: list[torch.Tensor], own: torch.Tensor, group: object) -> None:
        into[0].copy_(own)
        if own.dtype == torch.int64:
            into[1].fill_(len(data) if size is None else size)
        elif data:
            into[1][: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    monkeypatch.setattr(dist, "all_gather", all_gather)


def test_gather_reads_json_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    group: Any = None
    peer(monkeypatch, json.dumps(["theirs", 1]).encode())
    assert gather_json("ours", WORLD, group) == ["ours", ["theirs", 1]]
    trap = tmp_path / "ran"
    for data in (pickle.dumps(Trap(trap)), b"", b"\xff\0", b"[" * 100_000):
        peer(monkeypatch, data)
        with pytest.raises(RuntimeError, match="not JSON"):
            gather_json("ours", WORLD, group)
    for size in (-1, LARGEST_MESSAGE + 1):
        peer(monkeypatch, b"", size)
        with pytest.raises(RuntimeError, match="announced a message"):
            gather_json("ours", WORLD, group)
    assert not trap.exists()


def test_the_watchdog_ignores_what_ranks_do_not_send(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Through a real store, to which a stranger writes before the rank does."""
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    channel, trap = Channel("0", 0, WORLD, 5.0), tmp_path / "ran"
    for data in hostile(trap):
        store.queue_push("watchdog/0/rank/0", data)
        store.queue_push("watchdog/0/answers/1", data)
    channel.send({"question": 1})
    assert channel.next_message() == {"question": 1}
    channel.answer(1, {**ANSWER, "rank": 0})
    channel.answer(1, ANSWER)
    assert channel.ask(1, 5.0) == [{**ANSWER, "rank": 0}, ANSWER]
    assert not trap.exists()


def test_a_rank_does_not_wait_for_a_store_that_has_exited(monkeypatch: pytest.MonkeyPatch) -> None:
    """It exits between the two connections of a rank. Without its limit, the second would try for 20 days."""
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port, connect, stores = store.port, channel_module._connect, [store]
    del store
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))

    def connect_and_lose(timeout: float) -> Any:
        made = connect(timeout)
        stores.clear()
        return made

    monkeypatch.setattr(channel_module, "_connect", connect_and_lose)
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        Channel("0", 0, WORLD, 1.0)
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("strange", [None, -1, WORLD, 1e400, "x", [], {}, [WORLD], [True]])
def test_messages_with_strange_fields_are_ignored(strange: object) -> None:
    """Each field in turn; a value that fits its field stays a message."""
    assert answer_in(ANSWER, WORLD)
    assert verdict_in(VERDICT, WORLD)
    for name in ("rank", "waits"):
        assert answer_in({**ANSWER, name: strange}, WORLD) is None
    for name in ("is_silent", "culprits"):
        assert verdict_in({**VERDICT, name: strange}, WORLD) is None or (name, strange) == ("culprits", [])
    assert answer_in({**ANSWER, "more": strange}, WORLD) is None
    assert verdict_in({**VERDICT, "code": 0}, WORLD) is None
