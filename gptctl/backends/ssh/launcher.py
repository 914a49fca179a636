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

from gptctl.cli import ui
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.jobs.store import JobRecord
from gptctl.remote.connection import (
    BASH,
    BEGINS,
    Channel,
    Connection,
    HostError,
    Way,
    all_or_none,
    at_once,
    last_words,
    ways,
)
from gptctl.spec.cluster import cluster_of_job
from gptctl.spec.summary import count
from trainer.errors import UserError

NOT_SHIPPED = ("cluster.json", "git.json", "templates")

SLOWEST = 50_000  # bytes a second at which a job's folder is sent

# Takes the job's folder from its input, and becomes the agent. The words after it: folder, size of the archive, node,
# seconds for the archive: nobody may be left who waits for one that was cut off.
# In one line, as all that is sent: not every login shell lets a quoted text have several.
BEGIN = (
    'umask 077; mkdir -p "${1%/*}" || exit 73; '
    'mkdir "$1" || { [ ! -e "$1" ] || echo "$1 exists: do hosts share run_root, or did another gptctl make it?" >&2; '
    "exit 73; }; "
    'said=$(timeout "$4" head -c "$2" | LC_ALL=C tar -xzf - -C "$1" 2>&1) || { rm -rf "$1"; '
    'case $said in *"Wrote only"*|*"No space left"*) said="No space left on device: $1";; esac; '
    'echo "$said" | head -n 1 >&2; exit 74; }; '
    'GPTCTL_RUN_DIR=$1 GPTCTL_TAKE_BACK=$4 exec bash --norc "$1/agent.sh" agent "$3"'
)
# Where another host has put the folder, in a file system that they share: it may be seen here some seconds later.
JOIN = (
    'while [ "$SECONDS" -le "${4%.*}" ]; do '
    '[ ! -e "$1/agent.sh" ] || GPTCTL_RUN_DIR=$1 exec bash --norc "$1/agent.sh" agent "$3"; sleep 0.2; done; '
    'echo "error: $1, made by the first host, is not seen here, though the profile has shared_fs: true" >&2; exit 73'
)


# What an agent that was killed could not take back. Words: folder and token of the job.
TAKE_BACK = (
    '[ "$(cat "$1/.token" 2> /dev/null)" = "$2" ] || exit 0; '
    'for pid in $(grep -lszxF "GPTCTL_RUN_DIR=$1" /proc/[0-9]*/environ | cut -d/ -f3); do kill -KILL "$pid"; done; '
    'rm -rf "$1"'
)


class Agent:
    """The agent of one host, as gptctl talks to it while it is armed."""

    def __init__(self, way: Way, node: int) -> None:
        self.way, self.node = way, node
        self.connection = Connection(way)
        self._channel: Channel | None = None
        self._sending = threading.Lock()
        self._rest = b""
        self._is_begun = False  # before that, the login shell may have its say

    def begin(self, plan: LaunchPlan, archive: bytes, lease: float, **hello: Any) -> None:
        script = BEGIN if archive else JOIN
        words = (len(archive), self.node, lease + len(archive) / SLOWEST)
        self._channel = self.connection.start(
            [*BASH, script, "gptctl", plan.run_dir, *map(str, words)]
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
            self._is_begun = self._line(patience) == BEGINS.encode()
        line = self._line(patience)
        try:
            message: dict[str, Any] = json.loads(line)
        except ValueError:
            raise HostError(
                self.way.name, f"its agent does not speak our language: {line[:80]!r}"
            ) from None
        if word not in message:
            raise HostError(
                self.way.name, str(message.get("refused", "its agent does not speak our language"))
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
                self.way.name, f"no answer in {patience:.0f} s", hint, is_lost=True
            ) from None
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _end(self) -> HostError:
        """The agent is gone: its last words, if the host is still there."""
        assert self._channel
        said = last_words(self._channel)
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        if not lines:
            return HostError(self.way.name, "the connection is lost", is_lost=True)
        return HostError(self.way.name, lines[-1].removeprefix("error: "))

    def take_back(self, plan: LaunchPlan, token: str) -> None:
        """At once, instead of when its lease is over."""
        with suppress(HostError):
            self.connection.run(
                [*BASH, TAKE_BACK, "gptctl", plan.run_dir, token], patience=self.way.timeout
            )

    def close(self) -> None:
        self.connection.close()


class Launch:
    """All hosts of a job, first armed, then committed. While it is open their leases are renewed."""

    def __init__(self, plan: LaunchPlan, record: JobRecord) -> None:
        self.plan, self.folder, self.token = plan, record.run_folder, record.token
        self.profile = cluster_of_job(self.folder)
        self.patience = 2 * self.profile.patience
        self.key = os.urandom(32).hex()  # by which the agents know each other
        self.agents: list[Agent] = []
        self.keeper = Keeper(self.profile.patience / 4)

    def arm(self) -> None:
        """Returns when all hosts are ready to begin; until then an error on any of them ends it on all."""
        hosts = ways(self.profile)[: self.plan.nodes]
        ui.say(f"connecting to {count(len(hosts), 'host')} …")
        self.agents = self._all_or_none(
            lambda item: Agent(item[1], item[0]), list(enumerate(hosts))
        )
        ui.say("sending the job to them …")
        head, *peers = self.agents
        is_shared = self.profile.shared_fs  # then the others find what the first one was sent
        self._begin([head] if is_shared else self.agents)
        (control,) = self._all_or_none(
            lambda agent: agent.receive("control", self.patience)["control"], [head]
        )
        self._begin(peers if is_shared else [])

        def join(peer: Agent) -> None:
            peer.send(join=control)
            peer.receive("armed", self.patience)

        self._all_or_none(join, peers)
        ui.say("all are armed: starting it …")

    def _begin(self, agents: Sequence[Agent]) -> None:
        archive = pack(self.folder)
        hello = {"key": self.key, "secrets": _secrets(self.plan)}

        def begin(agent: Agent) -> None:
            owns_folder = not self.profile.shared_fs or agent.node == 0
            own = archive if owns_folder else b""
            address = self.profile.hosts[agent.node].address
            agent.begin(self.plan, own, self.profile.patience, address=address, **hello)
            self.keeper.keep(agent)

        self._all_or_none(begin, agents)

    def _all_or_none(self, work: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        results = at_once(work, items)
        try:
            hint = f"gptctl doctor --cluster {self.plan.cluster} looks closer"
            return all_or_none(results, "nothing was started: ", hint)
        except UserError:
            for result in results:
                if isinstance(result, Agent):
                    result.close()
            raise

    def commit(self) -> dict[str, Any]:
        """Starts the job by one word; what the agent of the first host says of itself and of the endpoint."""
        head = self.agents[0]
        head.send(commit=True)
        return head.receive("committed", self.patience)

    def take_back(self) -> None:
        self.keeper.stop()
        at_once(lambda agent: agent.take_back(self.plan, self.token), self.agents)

    def close(self) -> None:
        self.keeper.stop()
        for agent in self.agents:
            agent.close()


class Keeper:
    """Renews the leases of armed agents while others still receive their files."""

    def __init__(self, every: float) -> None:
        self._every = every
        self._agents: list[Agent] = []
        self._stopped = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def keep(self, agent: Agent) -> None:
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
