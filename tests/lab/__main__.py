"""A shell on the login node of a lab: `python -m tests.lab [--nodes N] [--ssh N] [--accounting] [-c COMMAND]`"""

from __future__ import annotations

import argparse
import subprocess
import sys

from tests.lab import Lab, missing
from tests.lab.machines import outer_environment

GREETING = """\
You are on the login node of a real Slurm cluster with {nodes} nodes of 2 GPUs; the GPUs are make-believe. Try:

    sinfo
    gptctl init && gptctl submit --nodes {nodes} --cluster lab
    gptctl logs --follow
{hosts}
`exit` ends the shell, and nothing of the cluster stays.
"""


HOSTS = """
and, on {number} machines without a scheduler, one of them behind a bastion:

    gptctl doctor --cluster hosts
    gptctl submit --nodes {number} --gpus-per-node 1 --cluster hosts --follow && gptctl fetch
"""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.lab", description=__doc__)
    parser.add_argument("--nodes", type=int, default=2, help="Slurm nodes, up to 12")
    parser.add_argument(
        "--ssh", type=int, default=2, help="hosts without Slurm, and a bastion before one more; 0: none"
    )
    parser.add_argument("--accounting", action="store_true", help="with slurmdbd, so that sacct answers")
    parser.add_argument("-c", dest="command", help="run this instead of a shell")
    return parser.parse_args()


def main() -> int:
    wanted = arguments()
    if lacking := missing():
        print(f"error: no lab here: {lacking}", file=sys.stderr)
        return 3
    with Lab(nodes=wanted.nodes, accounting=wanted.accounting, ssh=wanted.ssh) as lab:
        work = lab.shared / "work"
        lab.profile(work)
        if lab.hosts:
            lab.hosts_profile(work)
        shell = ["bash", "-c", wanted.command] if wanted.command else ["bash", "--norc", "-i"]
        if not wanted.command:
            hosts = HOSTS.format(number=wanted.ssh + 1) if wanted.ssh else ""
            print(GREETING.format(nodes=wanted.nodes, hosts=hosts))
        command = lab.argv("head", *shell, cwd=work, env={"PS1": r"\u@\h:\W\$ "})
        return subprocess.call(command, env=outer_environment())


if __name__ == "__main__":
    sys.exit(main())
