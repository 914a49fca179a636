"""Strangers at the port where the agent of a first host waits for the others. They do not have the job's key.

strangers.py watch UID                  prints `ADDRESS PORT` when a process of this user begins to listen
strangers.py knock ADDRESS COUNT FLAG   reads those lines; at each port COUNT strangers knock, then it creates the file
                                        FLAG.NUMBER, and they continue until nobody listens; prints `ADDRESS KNOCKED`
"""

from __future__ import annotations

import itertools
import json
import socket
import struct
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

PORTS = range(20000, 32000)  # where agents listen
CONCURRENT = 300  # connections that stay open at a time: more than the agent lets wait
PROOF = "0" * 64


def lines() -> list[bytes | None]:
    """What strangers say; None: they reset the connection."""
    objects: list[object] = [
        {"node": 1, "proof": PROOF},
        {"node": 1, "nonce": "0" * 32, "proof": PROOF},
        {"node": 2, "challenge": "0" * 32, "proof": PROOF},
        {"node": True, "nonce": "0" * 32, "proof": PROOF},
        {"node": 10**400, "nonce": [], "proof": {}},
        {"node": None, "nonce": None, "proof": None},
        {"node": -1, "nonce": "\u0665" * 32, "proof": "\u00fc" * 64},
        {"node": 1.5, "nonce": 1e300, "proof": [PROOF]},
        [],
        "hello",
    ]
    return [
        b'{"node": 1, "proof": "\\ud800"}\n',
        b'{"node": 1, "nonce": "\\udfff", "proof": "\\ud800"}\n',
        *(json.dumps(each).encode() + b"\n" for each in objects),
        b"[" * 60_000 + b"\n",
        b'{"node": ' * 5_000 + b"\n",
        b'{"node": ' + b"9" * 6_000 + b"}\n",
        b'{"node": NaN, "proof": Infinity}\n',
        b'{"node": 1, "pro',
        b"\xff\xfe\x00\n",
        b"\n" * 1000,
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"x" * (1 << 21),
        b"",
        b"",
        b"",
        None,
    ]


class Strangers:
    def __init__(self, address: str) -> None:
        self.address = address
        self.open: deque[socket.socket] = deque()
        self.saying = itertools.cycle(lines())

    def knock(self, port: int) -> bool:
        """One more stranger; whether anybody listens."""
        try:
            connection = socket.create_connection((self.address, port), timeout=5)
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
        connection.setblocking(False)
        if (line := next(self.saying)) is None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
            return True
        with suppress(OSError):
            connection.send(line)
        self.open.append(connection)
        if len(self.open) > CONCURRENT:
            self.open.popleft().close()
        return True

    def leave(self) -> None:
        for connection in self.open:
            connection.close()
        self.open.clear()


def knock(address: str, count: int, flag: str) -> None:
    for number, line in enumerate(sys.stdin):
        own, port = line.split()
        strangers, knocked = Strangers(address), 0
        while strangers.knock(int(port)):
            knocked += 1
            if knocked == count:
                Path(f"{flag}.{number}").touch()
        Path(f"{flag}.{number}").touch()
        strangers.leave()
        print(own, knocked, flush=True)


def listening(user: int) -> set[tuple[str, int]]:
    found = set()
    for family, file in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/net/{file}").read_text().splitlines()[1:]:
            fields = line.split()
            address, _, port = fields[1].partition(":")
            words = [int(address[at : at + 8], 16) for at in range(0, len(address), 8)]
            if fields[3] == "0A" and int(fields[7]) == user and int(port, 16) in PORTS:
                found.add((socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words)), int(port, 16)))
    return found


def watch(user: int) -> None:
    known: set[tuple[str, int]] = set()
    while True:
        now = listening(user)
        for address, port in now - known:
            print(address, port, flush=True)
        known = now
        time.sleep(0.02)


if __name__ == "__main__":
    if sys.argv[1] == "watch":
        watch(int(sys.argv[2]))
    else:
        knock(sys.argv[2], int(sys.argv[3]), sys.argv[4])
