"""Verbs for the nodes of a running job: a shell there, the stacks of its ranks, its ports."""

from __future__ import annotations

import os
import sys

import click

from gptctl.cli import INTERRUPTED
from gptctl.cli.options import as_json_option, examples, job_argument
from gptctl.cli.session import Session, require_folder
from gptctl.jobs.store import JobRecord
from trainer.errors import ANSWER_IS_NO, OUT_OF_REACH, WRONG_USAGE, UserError

node_option = click.option(
    "--node", type=int, default=0, show_default=True, metavar="N", help="Use this node."
)


def running_job(session: Session, job: str | None, node: int, module: str) -> JobRecord:
    """Find a job that runs, and check that its engine can do this on that node."""
    from gptctl.jobs.on_node import require_module, require_node, require_running

    record = session.find(job)
    require_running(record, session.state_of(record))
    require_folder(record)
    require_node(record, node)
    require_module(record, module)
    return record


@click.command(
    epilog=examples(
        "gptctl shell gpt-3f9a2c", "gptctl shell gpt-3f9a2c --node 1 -- nvidia-smi --query-gpu=name"
    )
)
@job_argument(required=True)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND]")
@node_option
@click.pass_obj
def shell(session: Session, job: str, command: tuple[str, ...], node: int) -> None:
    """Open a shell on a node of a running job, or run a command there.

    It starts in the run folder with the environment of the ranks, and does not disturb the job.
    Exit code: that of the shell or command.
    """
    from gptctl.cli import ui
    from gptctl.engine.processes import clean_environment

    record = running_job(session, job, node, "node_shell")
    has_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    words = ["node_shell", str(node), *command]
    line = session.backend_of(record).node_command(record, node, words, has_terminal)
    if not command:
        ui.say(f"node {node} of {record.id}; `exit` leaves the shell, not the job")
    sys.stdout.flush()
    # Become that program: signals, the terminal and the exit code are its own.
    try:
        os.execvpe(line[0], line, clean_environment())
    except FileNotFoundError:
        raise UserError(f"{line[0]} is not installed here", "", OUT_OF_REACH) from None


@click.command(epilog=examples("gptctl stacks", "gptctl stacks gpt-3f9a2c --rank 3 --threads"))
@job_argument(required=False)
@click.option("--rank", type=int, metavar="R", help="Show this rank only.")
@click.option("--threads", is_flag=True, help="Show all threads, not only the main one.")
@as_json_option
@click.pass_obj
def stacks(
    session: Session, job: str | None, rank: int | None, threads: bool, as_json: bool
) -> int:
    """Show what every rank of a running job is executing.

    It prints the Python stacks, the innermost call first; ranks with the same stack are one group.
    The ranks keep running. Without JOB: the latest job of this folder, or else your latest.
    Exit code 1: a rank did not answer.
    """
    from gptctl.cli import ui
    from gptctl.jobs.on_node import collect_stacks
    from gptctl.jobs.stack_groups import problems, shown

    record = running_job(session, job, 0, "stacks")
    if rank is not None and not 0 <= rank < record.world:
        message = f"there is no rank {rank}: {record.id} has ranks 0 to {record.world - 1}"
        raise UserError(message, "", WRONG_USAGE)
    answer = collect_stacks(session.backend_of(record), record, rank)
    if as_json:
        ui.print_json(answer)
    else:
        ui.print_text(shown(answer, threads))
    return ANSWER_IS_NO if problems(answer) else 0


@click.command(
    epilog=examples(
        "gptctl forward gpt-3f9a2c 6006", "gptctl forward gpt-3f9a2c 8080:18080 --node 1"
    )
)
@job_argument(required=True)
@click.argument("port", metavar="PORT[:LOCAL]")
@node_option
@click.pass_obj
def forward(session: Session, job: str, port: str, node: int) -> int:
    """Forward a port of a node, such as TensorBoard's, to this machine.

    It listens on port LOCAL of 127.0.0.1; without LOCAL, on the same port number. It stops at
    Ctrl-C, or when the job ends.
    """
    from gptctl.cli import ui
    from gptctl.jobs.on_node import forwarded_ports
    from gptctl.jobs.tunnel import LOOPBACK, listening_socket
    from gptctl.jobs.tunnel import forward as carry

    there, here = forwarded_ports(port)
    record = running_job(session, job, node, "relay")
    backend = session.backend_of(record)
    # The port is on this machine already: nothing has to be forwarded to the same number.
    if backend.nodes_are_here and here in (None, there):
        ui.print_text(f"http://{LOOPBACK}:{there}")
        ui.say(f"{record.id} runs on this machine: nothing has to be forwarded")
        return 0
    listener = listening_socket(here or there, there)
    line = backend.node_command(record, node, ["relay", str(there)], has_terminal=False)

    def ready() -> None:
        ui.print_text(f"http://{LOOPBACK}:{here or there}")
        sys.stdout.flush()
        ui.say(f"forwards to port {there} on node {node} of {record.id}; Ctrl-C stops it")

    try:
        with listener:
            carry(line, listener, ready, lambda: session.is_over(record), ui.say)
    except KeyboardInterrupt:
        return INTERRUPTED
    ui.say(f"{record.id}: {session.state_of(record)}")
    return 0
