"""Start a job on ssh hosts in two phases, like a distributed transaction.

Prepare: every host gets the job's folder and an agent; the agents of the others join the first.
Commit:  one message to the first host starts the job.
So a connection that breaks at any moment leaves all hosts running the job, or none: agents that are
not committed roll back by themselves (`agent.py`), at the latest when their lease expires.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from gptctl.engine.file_reading import parse_json
from gptctl.engine.handshake import node_key
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.engine.messages import MAX_BUFFER
from gptctl.jobs.store import JobRecord
from gptctl.remote.answers import is_commit, is_endpoint
from gptctl.remote.archive import MIN_SPEED, pack, secrets_of
from gptctl.remote.connection import (
    Channel,
    Connection,
    JumpHosts,
    remaining_stderr,
    routes,
)
from gptctl.remote.host_error import HostError, all_or_none, silent_host
from gptctl.remote.parallel import in_parallel
from gptctl.remote.route import Route
from gptctl.remote.scripts import START_MARKER, remote_command
from gptctl.reporting import Say
from gptctl.spec.cluster import cluster_of_job
from gptctl.text import count
from trainer.errors import UserError

UNEXPECTED = "unexpected reply from its agent"
MAX_REFUSAL = 2000  # characters of a host's reason; it may name several files
ROLL_BACK_TIMEOUT = 5.0  # seconds: the user is waiting, perhaps after Ctrl-C


class AgentClient:
    """Talks to the agent of one host until the job is committed."""

    def __init__(self, route: Route, node: int, jump_hosts: JumpHosts) -> None:
        self.route, self.node = route, node
        self.connection = Connection(route, jump_hosts)
        self._channel: Channel | None = None
        self._sending = threading.Lock()
        self._buffer = b""
        self._has_started = False  # before that, the login shell may print something
        self._is_silent = False

    def begin(self, plan: LaunchPlan, archive: bytes, lease: float, **hello: Any) -> None:
        """Send the job's folder, and start the agent there."""
        # Without an archive another host has unpacked the folder on a shared file system.
        script = "receive_job.sh" if archive else "join_job.sh"
        # The host waits only so long for the archive: gptctl may be killed while it is sent.
        limit = lease + len(archive) / MIN_SPEED
        words = map(str, (len(archive), self.node, limit, lease))
        # The same limit for all of it: a host may read one byte a second, and answer nothing.
        with self.connection.in_time(limit):
            self._channel = self.connection.start(remote_command(script, plan.remote_dir, *words))
            self._write(archive)
            self.send(lease=lease, **hello)
            self._await_start(self.route.patience)

    def send(self, **message: Any) -> None:
        self._write(json.dumps(message).encode() + b"\n")

    def _write(self, data: bytes) -> None:
        assert self._channel
        # If the agent has exited, `receive` reports why.
        with suppress(OSError), self._sending:
            self._channel.sendall(data)

    def receive(self, key: str, timeout: float) -> dict[str, Any]:
        """Return the next message, which must have this key; raise HostError otherwise."""
        # One deadline for all lines: a host may print something every second, forever.
        deadline = time.monotonic() + timeout
        try:
            line = self._line(deadline)
        except TimeoutError:
            problem = f"no answer in {timeout:.0f} s"
            hint = "check that no line of `setup` hangs, or increase `start_timeout` in the profile"
            raise HostError(self.route.name, problem, hint, is_lost=True) from None
        message = parse_json(line)
        if message is None:
            raise self._unexpected(line)
        if key not in message:
            problem = str(message.get("refused", UNEXPECTED))[:MAX_REFUSAL]
            raise HostError(self.route.name, problem)
        return message

    def _await_start(self, seconds: float) -> None:
        """Skip what the login shell printed before the agent started."""
        # Nothing of the job runs yet that could need its time.
        deadline = time.monotonic() + seconds
        try:
            while not self._has_started:
                self._has_started = self._line(deadline) == START_MARKER.encode()
        except TimeoutError:
            self._is_silent = True
            raise silent_host(self.route.name, seconds) from None

    def _line(self, deadline: float) -> bytes:
        while b"\n" not in self._buffer:
            if len(self._buffer) > MAX_BUFFER:
                raise self._unexpected(self._buffer)
            self._buffer += self._receive(deadline)
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _receive(self, deadline: float) -> bytes:
        assert self._channel
        timeout = deadline - time.monotonic()
        if timeout <= 0:
            raise TimeoutError
        self._channel.settimeout(timeout)
        data: bytes = self._channel.recv(1 << 16)
        if not data:
            raise self._exit_error()
        return data

    def _unexpected(self, reply: bytes) -> HostError:
        return HostError(self.route.name, f"{UNEXPECTED}: {reply[:80]!r}")

    def _exit_error(self) -> HostError:
        """Explain why the agent closed its output: by its last error message, if there is one."""
        assert self._channel
        if self.connection.is_silent:
            return silent_host(self.route.name, self.route.patience)
        errors = remaining_stderr(self._channel)
        lines = [line.strip() for line in errors.splitlines() if line.strip()]
        if not lines:
            return HostError(self.route.name, "lost the connection", is_lost=True)
        return HostError(self.route.name, lines[-1].removeprefix("error: "))

    def roll_back(self, plan: LaunchPlan, token: str) -> None:
        """Remove the job from the host now, instead of when its lease expires."""
        # A host that does not answer now does so by itself later.
        if self._is_silent:
            return
        with suppress(HostError):
            command = remote_command("roll_back.sh", plan.remote_dir, token)
            self.connection.run(command, timeout=min(ROLL_BACK_TIMEOUT, self.route.patience))

    def close(self) -> None:
        self.connection.close()


class Launcher:
    """Prepares a job on all its hosts, renews the leases meanwhile, and commits it."""

    def __init__(
        self, plan: LaunchPlan, record: JobRecord, jump_hosts: JumpHosts, say: Say
    ) -> None:
        self.plan, self.folder, self.token = plan, record.run_folder, record.token
        self._jump_hosts, self._say = jump_hosts, say
        self.profile = cluster_of_job(self.folder)
        self.timeout = 2 * self.profile.start_timeout
        # Agents prove to each other that they have this key: the network is not trusted.
        self.key = os.urandom(32)
        self.agents: list[AgentClient] = []
        self.leases = LeaseRenewer(self.profile.start_timeout / 4)

    def prepare(self) -> None:
        """Return when all hosts are ready to start; raise UserError if any host cannot."""
        hosts = routes(self.profile)[: self.plan.nodes]
        self._say(f"connecting to {count(len(hosts), 'host')} …")
        self.agents = self._all_or_none(
            lambda item: AgentClient(item[1], item[0], self._jump_hosts), list(enumerate(hosts))
        )
        self._say("sending the job …")
        head, *peers = self.agents
        # On a shared file system only the first host gets the folder; the others wait for it.
        is_shared = self.profile.shared_fs
        self._begin([head] if is_shared else self.agents)
        # The address where the agent of the first host listens for the others.
        (control,) = self._all_or_none(self._control_of, [head])
        self._begin(peers if is_shared else [])

        def join(peer: AgentClient) -> None:
            peer.send(join=control)
            peer.receive("prepared", self.timeout)

        # Every host must have joined before the commit: afterwards nothing can be refused.
        self._all_or_none(join, peers)
        self._say("all hosts are ready; starting the job …")

    def _control_of(self, head: AgentClient) -> list[Any]:
        control = head.receive("control", self.timeout)["control"]
        # The other hosts connect to it: a broken host must not send them just anywhere.
        if not is_endpoint(control):
            raise HostError(head.route.name, UNEXPECTED)
        return list(control)

    def _begin(self, agents: Sequence[AgentClient]) -> None:
        archive = pack(self.folder)
        # As bytes: a variable need not be valid UTF-8.
        secrets = {name: os.fsencode(value).hex() for name, value in secrets_of(self.plan).items()}

        def begin(agent: AgentClient) -> None:
            owns_folder = not self.profile.shared_fs or agent.node == 0
            own = archive if owns_folder else b""
            key = node_key(self.key, agent.node) if agent.node else self.key
            hello = {"address": self.profile.hosts[agent.node].address, "key": key.hex()}
            agent.begin(self.plan, own, self.profile.start_timeout, secrets=secrets, **hello)
            # From now on the agent rolls back unless it hears from gptctl.
            self.leases.keep(agent)

        self._all_or_none(begin, agents)

    def _all_or_none(self, work: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        results = in_parallel(work, items)
        try:
            hint = f"gptctl doctor --cluster {self.plan.cluster} checks the hosts"
            return all_or_none(results, "nothing was started: ", hint)
        # Connections to the other hosts would stay open: nobody else has them yet.
        except UserError:
            for result in results:
                if isinstance(result, AgentClient):
                    result.close()
            raise

    def commit(self) -> dict[str, Any]:
        """Start the job with one message; return the process and the endpoint of the first host."""
        head = self.agents[0]
        head.send(commit=True)
        message = head.receive("committed", self.timeout)
        # The job may run all the same: it is in doubt until the host answers correctly.
        if not is_commit(message):
            raise HostError(head.route.name, UNEXPECTED)
        return message

    def roll_back(self) -> None:
        self.leases.stop()
        in_parallel(lambda agent: agent.roll_back(self.plan, self.token), self.agents)

    def close(self) -> None:
        self.leases.stop()
        for agent in self.agents:
            agent.close()


class LeaseRenewer:
    """Renews the leases of prepared agents while other hosts still receive their files."""

    def __init__(self, every: float) -> None:
        self._every = every
        self._agents: list[AgentClient] = []
        self._stopped = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def keep(self, agent: AgentClient) -> None:
        self._agents.append(agent)

    def _run(self) -> None:
        while not self._stopped.wait(self._every):
            for agent in list(self._agents):
                agent.send(keep=True)

    def stop(self) -> None:
        self._stopped.set()
