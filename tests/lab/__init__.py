"""A real Slurm cluster and real ssh hosts on one machine, for tests and for trying things out (`make lab`).

    with Lab(nodes=2) as lab:
        lab.run("head", "srun", "-N2", "hostname").stdout      # node1 and node2
        lab.crash("node2")

Real slurmctld, slurmd, munge, slurmdbd, sshd, each machine with its own name, address and processes, all in unnamed
namespaces: a lab needs root, starts in seconds, exits with the process that started it, and leaves nothing behind.

Machines are `head` (the login node), `node1`… with 4 CPUs, 2 fake GPUs and 4000 MB each, and with `ssh=N` also
`ssh1`…, `bastion`, and `private1` behind it. With `laptop=True` the head has an sshd, and `laptop` reaches it; that
machine has neither Slurm nor any folder of the cluster. Users are root and gpt; their homes are shared by the head and the nodes,
private on ssh hosts. Partitions: `main`; `high`, which preempts it; `small`, one node and ten minutes. All machines
see this repository, its interpreter and the temporary folders at their own paths.
"""

from tests.lab.lab import Lab
from tests.lab.machines import LabError
from tests.lab.requirements import missing

__all__ = ["Lab", "LabError", "missing"]
