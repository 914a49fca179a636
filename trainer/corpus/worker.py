"""A worker process of `prepare`: takes blocks from a pipe and sends their tokens back.

    python -m trainer.corpus.worker FD

It exits when the pipe is closed, so it never outlives the command that started it.
"""

from __future__ import annotations

import queue
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

from trainer.corpus.encoding import Encoder, Rules
from trainer.corpus.tokenizer import open_tokenizer
from trainer.errors import UserError


def main(arguments: Sequence[str]) -> int:
    # Ctrl-C reaches all processes of a terminal: the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link: Connection = Connection(int(arguments[0]))
    with suppress(EOFError, OSError):  # the parent has exited
        _serve(link)
    return 0


def _serve(link: Connection) -> None:
    source, eos, rules = link.recv()
    try:
        encoder = Encoder(open_tokenizer(source, eos), Rules(*rules))
    except UserError as error:
        link.send(error)
        return
    # A thread reads the next block meanwhile: the parent must never wait to send it.
    waiting: queue.SimpleQueue[object] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(link, waiting), daemon=True).start()
    while (block := waiting.get()) is not None:
        link.send(encoder.encode(block))  # type: ignore[arg-type]


def _receive(link: Connection, waiting: queue.SimpleQueue[object]) -> None:
    with suppress(EOFError, OSError):
        while True:
            waiting.put(link.recv())
    waiting.put(None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
