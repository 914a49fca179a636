"""Starts a job on ssh hosts. Each has an agent: all are armed first, then one word to the first one starts the job.

So a connection that breaks at any moment leaves all hosts running the job, or none: what is not committed is taken back
by the agents themselves (`agent.py`), at the latest when their lease is over.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gptctl.engine.launch_plan import LaunchPlan
from gptctl.jobs.store import JobRecord
from gptctl.remote.connection import (
    START_MARKER,
    Channel,
    Connection,
    JumpHosts,
    Route,
    all_or_none,
    in_parallel,
    last_words,
    routes,
)
from gptctl.remote.host_error import HostError
from gptctl.remote.scripts import remote_command
from gptctl.reporting import Say
from gptctl.spec.cluster import cluster_of_job
from gptctl.text import count
from trainer.errors import UserError

NOT_SHIPPED = ("cluster.json", "git.json", "templates")

SLOWEST = 50_000  # bytes a second at which a job's folder is sent


class AgentClient:
    """The agent of one host, as gptctl talks to it while it is armed."""

    def __init__(self, route: Route, node: int, jump_hosts: JumpHosts) -> None:
        self.route, self.node = route, node
        self.connection = Connection(route, jump_hosts)
        self._channel: Channel | None = None
        self._sending = threading.Lock()
        self._rest = b""
        self._is_begun = False  # before that, the login shell may have its say

    def begin(self, plan: LaunchPlan, archive: bytes, lease: float, **hello: Any) -> None:
        script = "receive_job.sh" if archive else "join_job.sh"
        words = (len(archive), self.node, lease + len(archive) / SLOWEST)
        self._channel = self.connection.start(
            remote_command(script, plan.remote_dir, *map(str, words))
        )
        self._write(archive)
        self.send(lease=lease, **hello)

    def send(self, **message: Any) -> None:
        self._write(json.dumps(message).encode() + b"\n")

    def _write(self, data: bytes) -> None:
        """To an agent that is gone, nothing: whoever waits for its answer finds its last words."""
        assert self._channel
        with suppress(OSError), self._sending:
            self._channel.sendall(data)

    def receive(self, word: str, patience: float) -> dict[str, Any]:
        """The next message, in which the agent has to say this."""
        while not self._is_begun:
            self._is_begun = self._line(patience) == START_MARKER.encode()
        line = self._line(patience)
        try:
            message: dict[str, Any] = json.loads(line)
        except ValueError:
            raise HostError(
                self.route.name, f"its agent does not speak our language: {line[:80]!r}"
            ) from None
        if word not in message:
            raise HostError(
                self.route.name,
                str(message.get("refused", "its agent does not speak our language")),
            )
        return message

    def _line(self, patience: float) -> bytes:
        assert self._channel
        self._channel.settimeout(patience)
        try:
            while b"\n" not in self._rest:
                data = self._channel.recv(1 << 16)
                if not data:
                    raise self._end()
                self._rest += data
        except TimeoutError:
            hint = "does a line of setup hang? Or set patience in the profile"
            raise HostError(
                self.route.name, f"no answer in {patience:.0f} s", hint, is_lost=True
            ) from None
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _end(self) -> HostError:
        """The agent is gone: its last words, if the host is still there."""
        assert self._channel
        said = last_words(self._channel)
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        if not lines:
            return HostError(self.route.name, "the connection is lost", is_lost=True)
        return HostError(self.route.name, lines[-1].removeprefix("error: "))

    def roll_back(self, plan: LaunchPlan, token: str) -> None:
        """At once, instead of when its lease is over."""
        with suppress(HostError):
            self.connection.run(
                remote_command("roll_back.sh", plan.remote_dir, token), patience=self.route.timeout
            )

    def close(self) -> None:
        self.connection.close()


class Launcher:
    """All hosts of a job, first armed, then committed. While it is open their leases are renewed."""

    def __init__(
        self, plan: LaunchPlan, record: JobRecord, jump_hosts: JumpHosts, say: Say
    ) -> None:
        self.plan, self.folder, self.token = plan, record.run_folder, record.token
        self._jump_hosts, self._say = jump_hosts, say
        self.profile = cluster_of_job(self.folder)
        self.patience = 2 * self.profile.patience
        self.key = os.urandom(32).hex()  # by which the agents know each other
        self.agents: list[AgentClient] = []
        self.leases = LeaseRenewer(self.profile.patience / 4)

    def prepare(self) -> None:
        """Returns when all hosts are ready to begin; until then an error on any of them ends it on all."""
        hosts = routes(self.profile)[: self.plan.nodes]
        self._say(f"connecting to {count(len(hosts), 'host')} …")
        self.agents = self._all_or_none(
            lambda item: AgentClient(item[1], item[0], self._jump_hosts), list(enumerate(hosts))
        )
        self._say("sending the job to them …")
        head, *peers = self.agents
        is_shared = self.profile.shared_fs  # then the others find what the first one was sent
        self._begin([head] if is_shared else self.agents)
        (control,) = self._all_or_none(
            lambda agent: agent.receive("control", self.patience)["control"], [head]
        )
        self._begin(peers if is_shared else [])

        def join(peer: AgentClient) -> None:
            peer.send(join=control)
            peer.receive("armed", self.patience)

        self._all_or_none(join, peers)
        self._say("all are armed: starting it …")

    def _begin(self, agents: Sequence[AgentClient]) -> None:
        archive = pack(self.folder)
        hello = {"key": self.key, "secrets": _secrets(self.plan)}

        def begin(agent: AgentClient) -> None:
            owns_folder = not self.profile.shared_fs or agent.node == 0
            own = archive if owns_folder else b""
            address = self.profile.hosts[agent.node].address
            agent.begin(self.plan, own, self.profile.patience, address=address, **hello)
            self.leases.keep(agent)

        self._all_or_none(begin, agents)

    def _all_or_none(self, work: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        results = in_parallel(work, items)
        try:
            hint = f"gptctl doctor --cluster {self.plan.cluster} looks closer"
            return all_or_none(results, "nothing was started: ", hint)
        except UserError:
            for result in results:
                if isinstance(result, AgentClient):
                    result.close()
            raise

    def commit(self) -> dict[str, Any]:
        """Starts the job by one word; what the agent of the first host says of itself and of the endpoint."""
        head = self.agents[0]
        head.send(commit=True)
        return head.receive("committed", self.patience)

    def roll_back(self) -> None:
        self.leases.stop()
        in_parallel(lambda agent: agent.roll_back(self.plan, self.token), self.agents)

    def close(self) -> None:
        self.leases.stop()
        for agent in self.agents:
            agent.close()


class LeaseRenewer:
    """Renews the leases of armed agents while others still receive their files."""

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


def pack(folder: Path) -> bytes:
    """What a host needs of a job's folder, as an archive."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz", compresslevel=3) as archive:
        for entry in sorted(folder.iterdir()):
            if entry.name not in NOT_SHIPPED:
                archive.add(entry, entry.name)
    return stream.getvalue()


def _secrets(plan: LaunchPlan) -> dict[str, str]:
    """Secrets that are in this environment; those in files are read on the hosts."""
    names = [source["env"] for source in plan.secrets.values() if "env" in source]
    return {name: os.environ[name] for name in names if name in os.environ}
