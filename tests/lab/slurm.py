"""The Slurm of a lab: its configuration, its daemons, and how they are stopped, killed and started again."""

from __future__ import annotations

import os
import re
import stat
import time
from typing import NamedTuple

from tests.lab.machines import HEAD_ADDRESS, Machine, Machines, await_true

PORT, PROXY_PORT = 6817, 6816
SAVE_INTERVAL = 5  # seconds, from slurmctld's source; it saves a change at once if the last save is longer ago

CONF = """\
ClusterName=lab
SlurmctldHost=head({head})
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log

# No cgroups and no core binding, so that it runs in any container; Slurm trusts the configured resources.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=2
MpiDefault=none
SwitchType=switch/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
{accounting}

# What takes minutes at a site takes seconds here. A requeued job waits for cred_expire, otherwise two minutes.
AuthInfo=cred_expire=5
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,sched_min_interval=100000,batch_sched_delay=0
SlurmctldTimeout=10
SlurmdTimeout=10
MessageTimeout=5
TCPTimeout=2
BatchStartTimeout=10
KillWait={kill_wait}
UnkillableStepTimeout=20
CompleteWait=0
InactiveLimit=0
MinJobAge=600
ReturnToService=2
JobRequeue=1

# Without EnforcePartLimits a job that can never run is accepted, and pends forever.
EnforcePartLimits=ALL
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{user_signal}
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=1-0 PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace}
PartitionName=high Nodes=ALL MaxTime=1-0 PriorityTier=10 PreemptMode=OFF
PartitionName=small Nodes=ALL MaxNodes=1 MaxTime=10 PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace}
"""
NODE = "NodeName={name} NodeAddr={address} CPUs=4 RealMemory=4000 Gres=gpu:2 State=UNKNOWN\n"
ACCOUNTING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=head
AccountingStorageTRES=gres/gpu
AccountingStoreFlags=job_comment,job_script,job_env"""
NO_ACCOUNTING = "AccountingStorageType=accounting_storage/none"


class Settings(NamedTuple):
    accounting: bool
    grace: int  # seconds that a preempted job has left
    user_signal: bool  # a preempted job gets the signal that it asked for; otherwise only SIGTERM
    kill_wait: int  # seconds between SIGTERM and SIGKILL


class Slurm:
    """slurmctld on the head and a slurmd on every node."""

    def __init__(self, machines: Machines, nodes: list[Machine], settings: Settings) -> None:
        self.machines, self.nodes, self.settings = machines, nodes, settings
        self.folder = machines.folder
        self.conf = self.folder / "etc" / "slurm" / "slurm.conf"
        self._stopped = False
        self._since = 0

    def write_files(self) -> None:
        """Configuration, fake GPUs and the folders of the daemons, before any machine has power."""
        for name in ("etc/slurm", "etc/login", "state", *(f"spool/{node.name}" for node in self.nodes)):
            (self.folder / name).mkdir(parents=True)
        for number in range(2):  # gres accepts only device files
            os.mknod(self.folder / f"gpu{number}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        self.conf.write_text(self._conf(PORT))
        self.conf.with_name("gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-1]\n")
        # slurmd sets up a cgroup plugin even if nothing uses it, and exits if it cannot detect one.
        self.conf.with_name("cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        self.point_clients_to(PORT)

    def point_clients_to(self, port: int) -> None:
        """Tell the commands on the head where slurmctld is; slurmctld and the nodes use another file."""
        login = self.folder / "etc" / "login" / "slurm.conf"
        login.with_suffix(".new").write_text(self._conf(port))
        login.with_suffix(".new").rename(login)

    def _conf(self, port: int) -> str:
        return CONF.format(
            folder=self.folder,
            head=HEAD_ADDRESS,
            port=port,
            grace=self.settings.grace,
            kill_wait=self.settings.kill_wait,
            accounting=ACCOUNTING if self.settings.accounting else NO_ACCOUNTING,
            user_signal="SlurmctldParameters=preempt_send_user_signal" if self.settings.user_signal else "",
            nodes="".join(NODE.format(name=node.name, address=node.addresses[0]) for node in self.nodes),
        )

    def ask(self, command: str, *arguments: str) -> str:
        """Run the real client, without the proxy and without recording the call."""
        client = str(self.folder / "real" / command)
        env = {"SLURM_CONF": str(self.conf), "SLURM_TIME_FORMAT": "%s"}
        return self.machines.run("head", client, *arguments, env=env).stdout

    # slurmctld

    def start_controller(self) -> None:
        self.machines.daemon("head", "slurmctld", "-i", env={"SLURM_CONF": str(self.conf)})
        await_true(lambda: " is UP" in self.ask("scontrol", "ping"), "slurmctld answers")

    def kill_controller(self) -> None:
        pid = self._controller_pid()
        self._signal_controller("KILL")
        await_true(lambda: self.machines.run("head", "kill", "-0", pid).returncode, "slurmctld is dead")
        (self.folder / "run" / "slurmctld.pid").unlink()
        self._stopped = False

    def await_saved(self) -> None:
        file, now = self.folder / "state" / "job_state", time.time()
        while time.time() < now + SAVE_INTERVAL + 0.5 and (not file.exists() or file.stat().st_mtime < now):
            time.sleep(0.05)

    def stop_controller(self) -> None:
        self._signal_controller("STOP")
        self._stopped = True

    def continue_controller(self) -> None:
        self._signal_controller("CONT")
        self._stopped = False

    def _signal_controller(self, signal: str) -> None:
        self.machines.run("head", "kill", f"-{signal}", self._controller_pid(), check=True)

    def _controller_pid(self) -> str:
        return (self.folder / "run" / "slurmctld.pid").read_text().strip()

    # slurmd

    def start_nodes(self, names: list[str]) -> None:
        """Returns when jobs can run there: slurmctld has heard of these very daemons."""
        # Slurm reports starts in whole seconds: two starts must not share one.
        self._since = since = max(self._since + 1, int(time.time()))
        time.sleep(max(0, since - time.time()))
        for name in names:
            self.machines.daemon(name, "slurmd")
        await_true(lambda: self._ready(since).issuperset(names), f"slurmctld hears of {', '.join(names)}")

    def _ready(self, since: int) -> set[str]:
        ready = set()
        for line in self.ask("scontrol", "show", "node", "--oneliner").splitlines():
            found = dict(re.findall(r"(\w+)=(\S+)", line))
            begun = found.get("SlurmdStartTime", "")
            able = re.match(r"(IDLE|MIXED|ALLOCATED)(?!\*)", found.get("State", ""))  # * means: does not answer
            if able and begun.isdigit() and int(begun) >= since:
                ready.add(found["NodeName"])
        return ready

    # Between tests

    def revive_controller(self) -> None:
        if self._stopped:
            self.continue_controller()
        if not (self.folder / "run" / "slurmctld.pid").exists():
            self.start_controller()

    def unwell(self) -> set[str]:
        """Nodes that do not answer, or that Slurm reports as down."""
        return {name for name, state in self._states() if re.search(r"down|fail|\*", state)}

    def clear(self) -> None:
        """Cancel all jobs, and wait until all nodes are idle."""
        drained = {name for name, state in self._states() if "dr" in state}
        if drained:
            self.ask("scontrol", "update", f"NodeName={','.join(drained)}", "State=RESUME")
        await_true(self._cleared, "the queue is empty and all nodes are idle")

    def _cleared(self) -> bool:
        queue = dict(line.split() for line in self.ask("squeue", "-h", "-o", "%A %T").splitlines())
        alive = [job for job, state in queue.items() if state != "COMPLETING"]  # again: a job may requeue itself
        if alive:
            self.ask("scancel", *alive)
            self.ask("scancel", "--signal=KILL", "--full", *alive)  # no KillWait for those that ignore it
        return not queue and {state for _, state in self._states()} == {"idle"}

    def _states(self) -> list[tuple[str, str]]:
        lines = self.ask("sinfo", "-h", "-N", "-o", "%N %t").splitlines()
        return [(name, state) for name, state in map(str.split, lines)]
