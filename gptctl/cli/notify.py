"""The verb that tries notifications: it sends a message, and shows what the server answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from gptctl.cli.options import as_json_option, cluster_option, examples, override_option
from trainer.errors import ANSWER_IS_NO, WRONG_USAGE, UserError

if TYPE_CHECKING:
    from gptctl.engine.webhook import SendOutcome
    from gptctl.spec.check import Checked


@click.group(epilog=examples("gptctl notify test", "gptctl notify test run.yaml"))
def notify() -> None:
    """Test the notifications."""


@notify.command(
    epilog=examples(
        "gptctl notify test",
        "gptctl notify test run.yaml --cluster a800",
        "gptctl notify test -o Launch.notify.url.env=TEAM_WEBHOOK",
    )
)
@click.argument("config", required=False, type=click.Path())
@click.option("-c", "--config", "config_option", metavar="CONFIG", help="Same as CONFIG.")
@cluster_option
@override_option
@as_json_option
def test(
    config: str | None,
    config_option: str | None,
    cluster: str | None,
    overrides: tuple[str, ...],
    as_json: bool,
) -> int:
    """Send one message to every address, and show what the servers answered.

    It takes the addresses that a job of CONFIG would take: those of Launch.notify, of
    GPTCTL_NOTIFY, or of the profile. No config is needed. The message is sent from this machine:
    nodes may have no way out, even if it arrives.

    Exit code 0: all servers took the message; 1: one did not.
    """
    from gptctl.cli import ui
    from gptctl.jobs.submit import this_site
    from gptctl.planning.build import targets_of

    checked = _checked(config, config_option, cluster, overrides)
    targets = targets_of(checked.launch, this_site())
    if not targets:
        hint = "set Launch.notify, or GPTCTL_NOTIFY to a URL"
        raise UserError("nobody would be told about jobs", hint, WRONG_USAGE)
    # To stderr: stdout has the answers.
    ui.print_findings(checked.findings, to_stderr=True)
    rows = [{"target": name, **outcome._asdict()} for name, outcome in _send_to(targets)]
    if as_json:
        names = {"target": "target", "is_delivered": "delivered", "text": "answer"}
        ui.print_json([{new: row[old] for old, new in names.items()} for row in rows])
    else:
        cells = [
            [row["target"], "delivered" if row["is_delivered"] else "failed", row["text"]]
            for row in rows
        ]
        ui.print_table("notifications", ["target", "state", "answer"], cells)
    return 0 if all(row["is_delivered"] for row in rows) else ANSWER_IS_NO


def _checked(
    config: str | None,
    config_option: str | None,
    cluster: str | None,
    overrides: tuple[str, ...],
) -> Checked:
    """Check the config, of which only the addresses must be valid."""
    from gptctl.cli.overrides import one_config, typed_overrides
    from gptctl.spec.check import check_config, find_config

    named = one_config(config, config_option)
    try:
        path = find_config(named)
    except UserError:
        if named:
            raise
        path = None
    checked = check_config(path, typed_overrides({"cluster": cluster}, overrides))
    wrong = [
        finding
        for finding in checked.findings
        # Of a file that cannot be parsed, nothing is known.
        if not checked.tree or finding.key.startswith(("Launch.notify", "Launch.cluster", "notify"))
    ]
    checked = checked._replace(findings=tuple(wrong))
    if not checked.is_valid:
        raise UserError("the addresses are invalid", findings=wrong)
    return checked


def _send_to(targets: Sequence[Mapping[str, Any]]) -> list[tuple[str, SendOutcome]]:
    import os
    import time

    from gptctl.engine.address_reading import UnusableAddress, read_address, shown_address
    from gptctl.engine.notifications import trial_message
    from gptctl.engine.webhook import SendOutcome, send
    from gptctl.remote.parallel import in_parallel, successful

    message = trial_message(os.uname().nodename, time.time())

    def send_one(numbered: tuple[int, Mapping[str, Any]]) -> tuple[str, SendOutcome]:
        number, target = numbered
        try:
            address = read_address(target, os.environ)
        except UnusableAddress as problem:
            return f"target {number}", SendOutcome(False, str(problem))
        return shown_address(address.kind, address.url), send(address, message)

    return successful(in_parallel(send_one, list(enumerate(targets, 1))))
