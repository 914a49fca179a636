"""`gptctl forward`: a port of this machine leads to a port of a node, while the job runs."""

from __future__ import annotations

import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from gptctl.engine.processes import clean_environment
from gptctl.engine.relay import Relay
from gptctl.jobs.on_node import stderr_text
from gptctl.reporting import Say
from trainer.errors import OUT_OF_REACH, WRONG_USAGE, UserError

LOOPBACK = "127.0.0.1"
START_TIMEOUT = 60.0  # seconds until the relay on the node must have answered
CHECK_EVERY = 5.0  # seconds between two checks that the job still runs


def listening_socket(port: int, remote_port: int) -> socket.socket:
    """Listen on this machine only: the port leads into a job of this user."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK, port))
        listener.listen()
    except OSError as error:
        listener.close()
        message = f"cannot listen on port {port} of this machine: {str(error.strerror).lower()}"
        hint = f"choose another one: {remote_port}:LOCAL, such as {remote_port}:{_another(port)}"
        raise UserError(message, hint, WRONG_USAGE) from None
    listener.setblocking(False)
    return listener


def _another(port: int) -> int:
    return port + 10000 if port < 50000 else port - 10000


@contextmanager
def _relay_process(command: Sequence[str], errors: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run the other end; when this ends for any reason, its pipes close, and it exits, too."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            bufsize=0,
            env=clean_environment(),
            # Ctrl-C is for gptctl: srun would ask for a second one.
            start_new_session=True,
        )
    except FileNotFoundError:
        raise UserError(f"{command[0]} is not installed here", "", OUT_OF_REACH) from None
    try:
        yield process
    finally:
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()


def forward(
    command: Sequence[str],
    listener: socket.socket,
    on_ready: Callable[[], None],
    is_over: Callable[[], bool],
    say: Say,
) -> None:
    """Carry connections until the job is over; raise UserError if the connection ends before."""
    with tempfile.TemporaryFile() as errors, _relay_process(command, errors.fileno()) as process:
        assert process.stdin
        assert process.stdout
        pipes = process.stdout.fileno(), process.stdin.fileno()
        relay = Relay(*pipes, listener=listener, on_refused=once(say))
        relay.begin()
        deadline = time.monotonic() + START_TIMEOUT
        while not relay.has_begun and not relay.is_over and time.monotonic() < deadline:
            relay.step(1.0)
        if relay.has_begun:
            on_ready()
            _carry(relay, is_over)
        if not is_over():
            errors.seek(0)
            said = stderr_text(errors.read()) or f"{command[0]} exited"
            message = f"no connection to the node: {said}"
            raise UserError(message, "try again", OUT_OF_REACH)


def _carry(relay: Relay, is_over: Callable[[], bool]) -> None:
    """Move data until the job is over or the pipes are closed."""
    checked = time.monotonic()
    while not relay.is_over:
        relay.step(1.0)
        if time.monotonic() - checked > CHECK_EVERY:
            checked = time.monotonic()
            relay.is_over |= is_over()


def once(say: Say) -> Callable[[str], None]:
    """Report each reason why the node refuses connections only once: browsers try often."""
    told: set[str] = set()

    def report(reason: str) -> None:
        if reason not in told:
            say(f"the node refuses connections to this port: {reason.lower()}")
        told.add(reason)

    return report
