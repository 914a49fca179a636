"""The kinds of clusters, as far as checks and plans need them.

How jobs run on each kind: gptctl/backends/.
"""

from __future__ import annotations

from trainer.named_tuple import NamedTuple


class ClusterKind(NamedTuple):
    """What all clusters of one kind have in common."""

    backend: str  # module:class, imported only when it is used
    is_one_machine: bool = False  # all nodes of a job are processes of this machine
    has_queue: bool = False  # a scheduler allocates the nodes
    has_hosts: bool = False  # the profile lists the machines
    shares_files: bool = True  # this machine sees the files of the nodes
    keys: tuple[str, ...] = ()  # profile keys that no other kind has
    styles: tuple[str, ...] = ()  # launch styles that no other kind has
    runtimes: tuple[str, ...] = ()  # of containers: those that no other kind has


# Profile keys of all clusters that gptctl reaches by ssh.
CONNECTION_KEYS = ("identity_file", "known_hosts", "allow_proxy_command", "start_timeout")

KINDS: dict[str, ClusterKind] = {
    "local": ClusterKind("gptctl.backends.local:LocalBackend", is_one_machine=True),
    "slurm": ClusterKind(
        "gptctl.backends.slurm.backend:SlurmBackend",
        has_queue=True,
        keys=(
            *("partition", "account", "gpu_request", "cpus_per_task", "sbatch"),
            *("master_interface", "login"),
        ),
        styles=("sbatch", "srun-script", "loop"),
        runtimes=("pyxis",),
    ),
    "ssh": ClusterKind(
        "gptctl.backends.ssh.backend:SshBackend",
        has_hosts=True,
        shares_files=False,
        keys=("hosts", "shared_fs"),
    ),
}
