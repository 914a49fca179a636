"""Forwards TCP connections and makes the host behind them mute: `python muter.py FOLDER PORT TO-HOST TO-PORT`

FOLDER/mute says how, and is read again for every piece of data, so that it also applies to open connections:

    pass       forward everything
    silent     accept, and forward nothing
    greeting   forward the first piece that the host sends, its greeting, and nothing after it
    drip       forward one byte a second of what the host sends
    slow       forward 64 KiB of it every 10 ms; slower: every 0.1 s

FOLDER/seen gets a byte per connection. It knows nothing of what is sent.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from pathlib import Path


class Forwarder:
    def __init__(self, folder: Path, client: socket.socket, host: socket.socket) -> None:
        self.folder, self.client, self.host = folder, client, host
        self.has_greeted = False

    @property
    def mode(self) -> str:
        return (self.folder / "mute").read_text().strip()

    def start(self) -> None:
        for work in (self._to_host, self._to_client):
            threading.Thread(target=work, daemon=True).start()

    def _to_host(self) -> None:
        self._forward(self.client, self.host, self._pass_when_open)

    def _to_client(self) -> None:
        self._forward(self.host, self.client, self._answer)

    def _forward(self, source: socket.socket, target: socket.socket, send: object) -> None:
        try:
            while data := source.recv(1 << 16):
                send(target, data)  # type: ignore[operator]
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the other side has closed it

    def _pass_when_open(self, target: socket.socket, data: bytes) -> None:
        while self.mode == "silent":
            time.sleep(0.05)
        target.sendall(data)

    def _answer(self, target: socket.socket, data: bytes) -> None:
        while data:
            mode = self.mode
            if mode == "pass" or (mode == "greeting" and not self.has_greeted):
                target.sendall(data)
                self.has_greeted, data = True, b""
            elif mode == "drip":
                target.sendall(data[:1])
                data = data[1:]
                time.sleep(1)
            elif mode in ("slow", "slower"):
                target.sendall(data)
                data = b""
                time.sleep(0.01 if mode == "slow" else 0.1)
            else:
                time.sleep(0.05)


def main() -> None:
    folder, port, host, to = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    with socket.create_server(("", port), backlog=64) as listener:
        print("listening", flush=True)
        while True:
            client, _ = listener.accept()
            with (folder / "seen").open("a") as seen:
                seen.write("x")
            Forwarder(folder, client, socket.create_connection((host, to))).start()


if __name__ == "__main__":
    main()
