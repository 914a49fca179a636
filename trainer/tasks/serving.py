"""Answers requests with the network: one at a time, in the main thread, on all ranks."""

from __future__ import annotations

import os
import queue
import secrets
import threading
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from trainer.config.sections import Generation
from trainer.errors import OUT_OF_REACH, WRONG_USAGE, UserError
from trainer.input_files import LARGEST_STATUS, explain, read_bytes
from trainer.mesh import machines
from trainer.stop import StopRequest
from trainer.tasks.arguments import TaskParser
from trainer.tasks.completions import BadRequest, Request, Served
from trainer.tasks.http_server import Job, Server, is_loopback
from trainer.tasks.running import Loaded, loaded
from trainer.tasks.texts import add_generation_flags, generation_overrides
from trainer.tasks.writing import write

VARIABLE = "GPTCTL_SERVE_TOKEN"
SHORTEST_TOKEN = 16  # characters; shorter ones can be guessed
POLL = 0.5  # seconds between two looks for a stop request
HIGHEST_PORT = (1 << 16) - 1
HOW_TO_MAKE_ONE = "(umask 077; python3 -c 'import secrets; print(secrets.token_urlsafe())' > token)"


def run(description: str, arguments: Sequence[str], stop: StopRequest) -> None:
    given = _parser(description).parse_args(arguments)
    overrides = generation_overrides(given)
    with (
        _listening(given) as server,
        loaded(given, overrides, "`n` and `max_tokens` of the request") as model,
    ):
        if server:
            server.served = _served(model, given.model_name)
            address = _url(server)
            model.tell(f"Serving {server.served.name} at {address}. Stop it with Ctrl-C.")
        answer_requests(model, server, stop)


def _parser(description: str) -> TaskParser:
    parser = TaskParser(description)
    parser.add_argument("--host", default="127.0.0.1", help="an address other than 127.0.0.1 "
                        "needs a token")  # fmt: skip
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="0: any free one")
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help=f"what clients must send; default: ${VARIABLE}, or none",
    )
    parser.add_argument(
        "--timeout", type=float, default=120.0, metavar="SECONDS", help="longest answer"
    )
    parser.add_argument("--model-name", metavar="NAME", help="default: folder/step_N")
    parser.add_argument("--tokenizer", metavar="PATH", help="bytes, or the files of a tokenizer")
    add_generation_flags(parser)
    return parser


@contextmanager
def _listening(given: Namespace) -> Iterator[Server | None]:
    """The server of the first rank, which listens from now on; None on the others."""
    token = read_token(given.token_file)
    if not is_loopback(given.host) and token is None:
        message = f"--host {given.host} lets other machines use this model: a token is needed"
        hint = (
            f"write one to a file, and use --token-file FILE: {HOW_TO_MAKE_ONE}; or set {VARIABLE}"
        )
        raise UserError(message, hint, WRONG_USAGE)
    if not 0 <= given.port <= HIGHEST_PORT or not 0 < given.timeout < 1e6:
        message = f"--port {given.port} or --timeout {given.timeout:g} is invalid"
        raise UserError(message, f"use a port up to {HIGHEST_PORT} and some seconds", WRONG_USAGE)
    if machines().world > 1 and os.environ.get("RANK") != "0":
        yield None
        return
    try:
        # Before the model is loaded: a port that is taken should be known at once.
        server = Server(given.host, given.port, token, given.timeout)
    except OSError as error:
        message = f"cannot listen at {given.host}:{given.port}: {error.strerror or error}"
        raise UserError(message, "use another --port, or --port 0", OUT_OF_REACH) from None
    threading.Thread(target=server.serve_forever, args=(POLL,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def read_token(file: str | None) -> str | None:
    """The token of the file, or of the environment; None if there is neither."""
    text, source = os.environ.get(VARIABLE, ""), VARIABLE
    if file is not None:
        try:
            text, source = read_bytes(file, LARGEST_STATUS).decode(), file
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(explain(file, error), HOW_TO_MAKE_ONE, WRONG_USAGE) from None
        if os.stat(file).st_mode & 0o077:
            message = f"{file}: others can read this token"
            raise UserError(message, f"chmod 600 {file}", WRONG_USAGE)
    token = text.strip()
    if not token and file is None:
        return None
    if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable():
        message = f"the token in {source} must have at least {SHORTEST_TOKEN} characters of ASCII"
        raise UserError(message, HOW_TO_MAKE_ONE, WRONG_USAGE)
    return token


def _url(server: Server) -> str:
    host, port = server.server_address[:2]
    host = host.decode() if isinstance(host, (bytes, bytearray)) else host
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _served(model: Loaded, name: str | None) -> Served:
    folder = model.opened.folder.resolve()
    return Served(
        name or f"{folder.parent.name}/{folder.name}",
        model.tokenizer,
        model.network.vocab_size,
        model.network.context,
        model.run.Generation,
        lambda: secrets.randbits(62),
    )


def answer_requests(model: Loaded, server: Server | None, stop: StopRequest) -> None:
    """Answer until a signal comes. All ranks get each request from the first one."""
    while True:
        model.mesh.heartbeat.tick("waiting for a request")
        job = _next_job(server)
        told = model.mesh.gather([_as_json(job.request) if job else None, bool(stop.signal)])
        if any(is_stopped for _, is_stopped in told):
            break
        if told[0][0] is not None:
            _answer(model, _from_json(told[0][0]), job, stop)
    while job is not None:
        job.events.put(BadRequest("the server is stopping", None, 503))
        job = _next_job(server, wait=0.0)


def _next_job(server: Server | None, wait: float = POLL) -> Job | None:
    if server is None:
        return None
    try:
        while True:
            job = server.jobs.get(timeout=wait) if wait else server.jobs.get_nowait()
            if not job.is_cancelled.is_set():  # by a client that has disconnected
                return job
    except queue.Empty:
        return None


def _answer(model: Loaded, request: Request, job: Job | None, stop: StopRequest) -> None:
    """Write the texts of a request, and send events to the thread that waits for them."""

    def show(number: int, text: str) -> None:
        if job and text and request.is_streamed:
            job.events.put((number, text))

    is_stopped = _limit(model, job, stop)
    try:
        texts = write(
            model.network,
            model.tokenizer,
            request.prompts,
            request.settings,
            request.seed,
            show,
            is_stopped,
        )
    except RuntimeError as error:
        # For example out of memory. With other ranks, nobody knows where they are.
        if job is None or model.mesh.world > 1:
            raise
        traceback.print_exc()
        reason = str(error).splitlines()[0][:200]
        job.events.put(BadRequest(f"the model failed: {reason}", None, 500))
        return
    if job:
        job.events.put(texts)


def _limit(model: Loaded, job: Job | None, stop: StopRequest) -> Callable[[], bool]:
    """When to stop writing. Several ranks cannot: all of them would have to at the same token."""
    if model.mesh.world > 1 or job is None:
        return lambda: False
    deadline = time.monotonic() + job.patience
    return lambda: job.is_cancelled.is_set() or time.monotonic() > deadline or bool(stop.signal)


def _as_json(request: Request) -> dict[str, Any]:
    return {**request._asdict(), "settings": asdict(request.settings)}


def _from_json(fields: dict[str, Any]) -> Request:
    settings = {**fields["settings"], "stop_words": tuple(fields["settings"]["stop_words"])}
    return Request(**{**fields, "settings": Generation(**settings)})
