"""The verbs of ssh hosts: whose keys are trusted, and what is brought home from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from gptctl.cli.options import as_json_option, complete_cluster, examples, job_argument
from trainer.errors import ANSWER_IS_NO, OUT_OF_REACH, WRONG_USAGE, UserError

if TYPE_CHECKING:
    from gptctl.remote.connection import ShownKey, Way


@click.group(epilog=examples("gptctl hosts trust lab", "gptctl hosts trust lab --yes"))
def hosts() -> None:
    """The hosts of ssh clusters."""


@hosts.command(epilog=examples("gptctl hosts trust lab", "gptctl hosts trust lab --json"))
@click.argument("cluster", shell_complete=complete_cluster)
@click.option("--yes", is_flag=True, help="Pin new keys without asking.")
@as_json_option
def trust(cluster: str, yes: bool, as_json: bool) -> int:
    """Show the fingerprints of a cluster's hosts, and pin those that are new.

    Compare them with what the machines themselves say: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub. A key that
    has changed is never pinned. With --json nothing is asked, and nothing is pinned unless --yes says so.
    """
    from gptctl.cli import ui
    from gptctl.remote.connection import pin
    from gptctl.spec.summary import count

    rows: list[dict[str, str]] = []
    problems: list[UserError] = []
    for round_of in in_rounds(
        ways_of(cluster)
    ):  # a jump host is trusted before what lies behind it
        shown = ask_keys(round_of, problems)
        new = [key for key in shown if key.state == "new"]
        if shown and not as_json:
            ui.print_table(
                "host keys", ["host", "key", "state"], [list(row_of(key).values()) for key in shown]
            )
        is_agreed = bool(new) and (
            yes or (not as_json and agrees(f"pin {count(len(new), 'new key')}?"))
        )
        for key in new if is_agreed else ():
            pin(key)
            ui.say(f"pinned: {key.way.name}")
        if new and not is_agreed and not as_json:
            raise UserError(
                "nothing more is pinned", "run it again, when the fingerprints are known"
            )
        rows += [
            {**row_of(key), "state": "pinned"} if is_agreed and key in new else row_of(key)
            for key in shown
        ]
    changed = [row["host"] for row in rows if row["state"] == "changed"]
    if as_json:
        ui.print_json({"keys": rows, "problems": [problem.message for problem in problems]})
    for problem in problems:
        ui.print_error(problem)
    if changed:
        hint = "somebody may be listening; only if you know why, delete its line from known_hosts"
        raise UserError(f"the key of {', '.join(changed)} has CHANGED", hint, ANSWER_IS_NO)
    return OUT_OF_REACH if problems else 0


@click.command(
    epilog=examples(
        "gptctl fetch gpt-3f9a2c", "gptctl fetch gpt-3f9a2c --to results --no-checkpoints"
    )
)
@job_argument(required=False)
@click.option(
    "--to",
    "target",
    metavar="DIR",
    help="Into this folder, instead of the job's own on this machine.",
)
@click.option("--checkpoints/--no-checkpoints", default=True, help="Checkpoints too; the default.")
@as_json_option
def fetch(job: str | None, target: str | None, checkpoints: bool, as_json: bool) -> int:
    """Bring home what a job has written on its ssh hosts: logs, metrics and checkpoints, or what a script left there.

    What is here already is not brought again, and what was interrupted goes on where it was.
    """
    from gptctl.cli import ui
    from gptctl.cli.jobs import find_job
    from gptctl.remote.fetch import bring_home

    record = find_job(job)
    if record.kind != "ssh":
        raise UserError(
            f"{record.id} runs where its files are seen from here",
            f"see {record.run_dir}",
            WRONG_USAGE,
        )
    brought = bring_home(record, target, checkpoints)
    if as_json:
        ui.print_json(brought._asdict())
    else:
        ui.print_text(f"{brought.files} files, {brought.bytes:,} bytes: {brought.folder}")
    return 0


def agrees(question: str) -> bool:
    try:
        return click.confirm(question, err=True)
    except click.Abort:
        raise UserError(
            "nobody answers", "--yes pins new keys without asking", WRONG_USAGE
        ) from None


def row_of(shown: ShownKey) -> dict[str, str]:
    from gptctl.remote.connection import fingerprint

    return {"host": shown.way.name, "key": fingerprint(shown.key), "state": shown.state}


def ways_of(cluster: str) -> list[Way]:
    from gptctl.remote.connection import ways
    from gptctl.spec.cluster import load_profile
    from trainer.errors import errors_in

    profile = load_profile(cluster)
    if errors_in(profile.findings):
        raise UserError(f"{cluster} cannot be used", findings=profile.findings)
    if profile.cluster.kind != "ssh":
        raise UserError(
            f"{cluster} is a cluster of kind {profile.cluster.kind}",
            "only ssh has hosts",
            WRONG_USAGE,
        )
    return ways(profile.cluster)


def in_rounds(ways: list[Way]) -> list[list[Way]]:
    """Each place once; what is reached through others comes after them."""
    rounds: list[dict[tuple[str, int], Way]] = []
    for way in ways:
        for depth, hop in enumerate((*way.jumps, way)):
            while len(rounds) <= depth:
                rounds.append({})
            rounds[depth].setdefault((hop.host, hop.port), hop._replace(jumps=way.jumps[:depth]))
    return [list(hops.values()) for hops in rounds]


def ask_keys(ways: list[Way], problems: list[UserError]) -> list[ShownKey]:
    from gptctl.remote.connection import at_once, shown_key

    answers = at_once(shown_key, ways)
    for answer in answers:
        if isinstance(answer, UserError):
            problems.append(answer)
        elif isinstance(answer, Exception):
            raise answer
    return [answer for answer in answers if not isinstance(answer, Exception)]
