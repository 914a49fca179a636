"""Breaks connections between the head's clients and slurmctld: `python proxy.py FOLDER ADDRESS PORT TO`

FOLDER/mode says what to do, and can be replaced at any time; its first word is a number that distinguishes orders.
FOLDER/faults gets a line per broken connection. A connection of Slurm has one request and one reply, each with a length
of four bytes and a body of that length; the proxy knows nothing else of the protocol.

    pass            drop-request           drop the request and close the connection
    delay SECONDS   drop-reply             forward the request, drop the reply
    random P SEED                          break each connection with probability P, by drop-request or drop-reply

All but the last may end with `once` or `at K`: apply it only to the first or the K-th connection from now on.
"""

from __future__ import annotations

import random
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

FAULTS = ("drop-request", "drop-reply")


class Mode:
    """Decide for each connection in turn; raise ValueError for an unknown order."""

    def __init__(self, text: str) -> None:
        words = text.split()
        self.at, words = _which(words)
        self.seen = 0
        match words:
            case ["pass" | "drop-request" | "drop-reply" as kind]:
                self.choose: Callable[[], tuple[str, float]] = lambda: (kind, 0.0)
            case ["delay", seconds]:
                pause = float(seconds)
                self.choose = lambda: ("delay", pause)
            case ["random", probability, seed] if not self.at:
                self.choose = _at_random(float(probability), seed)
            case _:
                raise ValueError(f"{text!r} is no mode of the proxy")

    def next(self) -> tuple[str, float]:
        """What to do with this connection, and the seconds of a delay."""
        self.seen += 1
        return self.choose() if self.at in (0, self.seen) else ("pass", 0.0)


def _which(words: list[str]) -> tuple[int, list[str]]:
    """Return the number of the chosen connection, 0 for all, and the words before it."""
    match words:
        case [*rest, "once"]:
            return 1, rest
        case [*rest, "at", number]:
            return int(number), rest
    return 0, words


def _at_random(probability: float, seed: str) -> Callable[[], tuple[str, float]]:
    generator = random.Random(seed)
    return lambda: (generator.choice(FAULTS) if generator.random() < probability else "pass", 0.0)


def read_message(connection: socket.socket) -> bytes:
    """Read length and body, or less if the other side has closed the connection."""
    message = _read(connection, 4)
    return message + _read(connection, int.from_bytes(message, "big")) if len(message) == 4 else b""


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (more := connection.recv(size - len(data))):
        data += more
    return data


def serve_one(client: socket.socket, upstream: tuple[str, int], decision: tuple[str, float], faults: Path) -> None:
    kind, pause = decision
    with client:
        try:
            request = read_message(client)
            reply = b"" if kind == "drop-request" else ask(upstream, request)
            time.sleep(pause)
            if kind not in FAULTS:
                client.sendall(reply)
        except OSError:
            pass  # either side may have exited; the other one notices the closed connection
        if kind != "pass":
            with faults.open("a") as file:
                file.write(f"{kind}\n")


def ask(upstream: tuple[str, int], request: bytes) -> bytes:
    with socket.create_connection(upstream) as server:
        server.sendall(request)
        return read_message(server)


def main() -> None:
    folder, address, port, to = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    order, mode = "", Mode("pass")
    with socket.create_server((address, port), backlog=64) as listener:
        while True:
            client, _ = listener.accept()
            if (text := (folder / "mode").read_text()) != order:
                order, mode = text, Mode(text.partition(" ")[2])
            arguments = (client, (address, to), mode.next(), folder / "faults")
            threading.Thread(target=serve_one, args=arguments, daemon=True).start()


if __name__ == "__main__":
    main()
