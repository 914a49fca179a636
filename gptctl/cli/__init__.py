"""The command line. Verbs parse, call and print; each is imported when it is used, so that one more costs nothing."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING

import click

from gptctl import __version__
from trainer.errors import WRONG_USAGE, UserError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

INTERRUPTED = 130
BUG = 70
READER_GONE = 141  # as a program that dies of SIGPIPE

# Section -> verb -> (module of gptctl.cli, summary). The summary is the first line of the verb's help.
VERBS = {
    "Start here": {
        "init": ("config", "Write a commented run config to start from."),
        "validate": ("config", "Check a run config and its layout, and report every mistake."),
        "submit": ("submit", "Check a run config, freeze what the job needs, and start it."),
        "logs": ("logs", "Show the logs of all ranks in one stream."),
    },
    "Jobs": {
        "list": ("jobs", "List jobs and their states."),
        "status": ("jobs", "Show the state of a job."),
        "show": ("jobs", "Show what a job was started with, and where each value came from."),
        "cancel": ("jobs", "Stop jobs; the trainer saves a checkpoint first."),
        "wait": ("jobs", "Wait until a job ends; exit with its status."),
        "rerun": ("submit", "Submit a job again from its saved files."),
        "fetch": ("jobs", "Copy what a job wrote on its ssh hosts to this machine."),
    },
    "Clusters": {
        "clusters": ("clusters", "List, show and check cluster profiles."),
        "doctor": ("clusters", "Check that a cluster can run jobs, and suggest fixes."),
        "hosts": ("clusters", "Manage the hosts of ssh clusters."),
    },
    "Config": {
        "topo": ("config", "Show where every rank runs, and the members of its groups."),
        "keys": ("config", "List the keys of run configs, their defaults and meanings."),
        "schema": ("config", "Print the JSON Schema of run configs, for editors."),
        "rules": ("config", "List the rules behind the codes of findings."),
        "render": ("submit", "Print the command line or script that launches a config."),
        "completion": ("config", "Print the completion script of a shell."),
    },
}
MODULE_OF = {verb: module for verbs in VERBS.values() for verb, (module, _) in verbs.items()}


class LazyGroup(click.Group):
    def list_commands(self, context: click.Context) -> list[str]:
        return list(MODULE_OF)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in MODULE_OF:
            return None
        module = import_module(f"gptctl.cli.{MODULE_OF[name]}")
        found = getattr(module, f"{name}_verb" if name == "list" else name)
        assert isinstance(found, click.Command)
        return found

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, MODULE_OF))
        for section, verbs in VERBS.items():
            with formatter.section(section):
                rows = [(verb.ljust(width), summary) for verb, (_, summary) in verbs.items()]
                formatter.write_dl(rows)

    def shell_complete(self, context: click.Context, incomplete: str) -> list[CompletionItem]:
        """Without importing the verbs."""
        from click.shell_completion import CompletionItem

        summaries = {verb: text for verbs in VERBS.values() for verb, (_, text) in verbs.items()}
        return [
            CompletionItem(verb, help=text)
            for verb, text in summaries.items()
            if verb.startswith(incomplete)
        ]


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="\b\nExamples:\n  gptctl init\n  gptctl validate config\n  gptctl submit --nodes 2 --follow",
)
@click.version_option(__version__, prog_name="gptctl")
@click.pass_context
def cli(context: click.Context) -> None:
    """Launch distributed GPT training jobs from one run config and a cluster profile."""
    from gptctl.cli.session import Session

    context.obj = Session()


def main() -> None:
    """The entry point: the one place where exceptions become messages and exit codes."""
    _make_streams_safe()
    try:
        code = _run()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader (head, less) has exited: nobody is left to tell
        code = READER_GONE
    except OSError as error:
        code = WRONG_USAGE
        with suppress(OSError):
            what = f"cannot use {error.filename}" if error.filename else "cannot write the output"
            print(f"error: {what}: {error.strerror}", file=sys.stderr)
    _abandon_broken_streams()
    os._exit(code)  # unloading modules would be a tenth of a short command's time


def _make_streams_safe() -> None:
    """A closed stream swallows what is written to it, and a terminal without × gets an escape."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (lives as long as the process)
        getattr(sys, name).reconfigure(errors="backslashreplace")


def _abandon_broken_streams() -> None:
    """A stream that cannot be flushed would make the interpreter exit with a code of its own."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _run() -> int:
    try:
        code = cli(prog_name="gptctl", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except SystemExit:  # click's answer to a broken pipe
        return READER_GONE
    except click.ClickException as error:
        if "--json" not in sys.argv:
            error.show()
            return WRONG_USAGE
        return _report(UserError(error.format_message(), "see --help", WRONG_USAGE))
    except UserError as error:
        return _report(error)
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except OSError:
        raise
    except Exception as error:
        return _report_bug(error)


def _report(error: UserError) -> int:
    from gptctl.cli import ui

    if "--json" in sys.argv:  # a program that asked for JSON gets JSON
        ui.print_json(error.as_json())
    else:
        ui.print_error(error)
    return error.exit_code


def _report_bug(error: Exception) -> int:
    if os.environ.get("GPTCTL_DEBUG"):
        raise error
    print(f"bug: {type(error).__name__}: {error}", file=sys.stderr)
    print("hint: please report it; GPTCTL_DEBUG=1 shows the traceback", file=sys.stderr)
    return BUG
