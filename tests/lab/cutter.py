"""Forwards TCP connections and cuts them: `python cutter.py FOLDER PORT TO-HOST TO-PORT`

FOLDER/cuts says how: `P SECONDS SEED` cuts each connection with probability P, after a random time of at most SECONDS.
FOLDER/connections gets a byte per connection, and FOLDER/number-of-cuts one per connection that was cut. It knows nothing of what is sent.
"""

from __future__ import annotations

import random
import socket
import struct
import sys
import threading
import time
from pathlib import Path

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset, and drops what was not sent yet


def note(file: Path) -> None:
    with file.open("a") as stream:
        stream.write("x")


def forward(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # it was cut


def cut(pair: tuple[socket.socket, socket.socket], seconds: float, cuts: Path) -> None:
    time.sleep(seconds)
    note(cuts)
    for end in pair:
        try:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            end.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it
        except OSError:
            pass  # the connection has ended before
        end.close()


def start(target: object, *arguments: object) -> None:
    threading.Thread(target=target, args=arguments, daemon=True).start()  # type: ignore[arg-type]


def main() -> None:
    folder, port, host, to = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    order, generator = "", random.Random(0)
    with socket.create_server(("127.0.0.1", port), backlog=64) as listener:
        while True:
            client, _ = listener.accept()
            if (text := (folder / "cuts").read_text()) != order:
                order, generator = text, random.Random(text)
            probability, seconds = map(float, order.split()[:2])
            is_cut, after = generator.random() < probability, generator.random() * seconds
            note(folder / "connections")
            pair = client, socket.create_connection((host, to))
            start(forward, *pair)
            start(forward, *reversed(pair))
            if is_cut:
                start(cut, pair, after, folder / "number-of-cuts")


if __name__ == "__main__":
    main()
