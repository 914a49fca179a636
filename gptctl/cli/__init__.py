"""The command line. A verb parses its options, calls the layers below and prints the answer.

A verb's module is imported only when the verb runs, so another verb does not slow down start-up.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING

import click

from gptctl import __version__
from trainer.errors import WRONG_USAGE, UserError, closest

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

INTERRUPTED = 130  # what a shell reports for a program killed by SIGINT: 128 + 2
BUG = 70  # EX_SOFTWARE of sysexits.h
BROKEN_PIPE = 141  # what a shell reports for a program killed by SIGPIPE: 128 + 13

# Section -> verb -> (module of gptctl.cli, summary). The summary is the first line of the verb's
# help; it is repeated here so that `gptctl --help` need not import the verbs.
VERBS = {
    "Start here": {
        "init": ("config", "Write a commented run config to start from."),
        "validate": ("config", "Check a run config and its layout, and report every mistake."),
        "submit": ("submit", "Check a run config, freeze what the job needs, and start it."),
        "logs": ("logs", "Show the logs of all ranks in one stream."),
    },
    "Jobs": {
        "list": ("listing", "List jobs and their states."),
        "top": ("top", "Watch jobs in full screen: progress, curves, slow ranks, events and logs."),
        "status": ("jobs", "Show the state of a job."),
        "why": ("why", "Explain why a job waits, failed, or seems stuck."),
        "plot": ("plot", "Plot the loss, or another metric, of one or more jobs."),
        "report": (
            "report",
            "Write an HTML report about one or more jobs, to look at in a browser.",
        ),
        "cost": ("cost", "Show where the GPU hours of jobs went."),
        "diff": ("diff", "Compare two jobs: config, code, environment, data and metrics."),
        "trace": ("trace", "Summarise the profile of a job, and name its traces."),
        "show": ("jobs", "Show what a job was started with, and where each value came from."),
        "cancel": ("jobs", "Stop jobs; the trainer saves a checkpoint first."),
        "wait": ("jobs", "Wait until a job ends; exit with its status."),
        "resume": ("rerun", "Continue a job from its newest checkpoint, as a new job."),
        "rerun": ("rerun", "Submit a job again from its saved files."),
        "tag": ("tag", "Set, remove or show the tags and the note of jobs."),
        "rm": ("remove", "Remove the run folders of jobs; their history stays."),
        "shell": ("nodes", "Open a shell on a node of a running job, or run a command there."),
        "stacks": ("nodes", "Show what every rank of a running job is executing."),
        "forward": (
            "nodes",
            "Forward a port of a node, such as TensorBoard's, to this machine.",
        ),
        "sweep": ("sweep", "Run one config with many values, and compare the results."),
        "fetch": ("jobs", "Copy the files that a job wrote on other machines to this one."),
    },
    "Data": {
        "data": ("data", "Turn text into token files for training, and look into them."),
    },
    "Models": {
        "eval": ("tasks", "Measure the perplexity or the cloze accuracy of a checkpoint."),
        "generate": ("tasks", "Generate text with a checkpoint."),
        "serve": ("tasks", "Serve completions of a checkpoint over HTTP, to try a model."),
        "export": ("tasks", "Export a checkpoint as a folder that Hugging Face's GPT-2 loads."),
        "import": ("tasks", "Import weights of GPT-2: Hugging Face, nanoGPT or Megatron names."),
    },
    "Clusters": {
        "clusters": ("clusters", "List, show and check cluster profiles."),
        "doctor": ("clusters", "Check that a cluster can run jobs, and suggest fixes."),
        "hosts": ("clusters", "Manage the hosts that gptctl reaches by ssh."),
    },
    "Config": {
        "topo": ("config", "Show where every rank runs, and the members of its groups."),
        "keys": ("config", "List the keys of run configs, their defaults and meanings."),
        "schema": ("config", "Print the JSON Schema of run configs, for editors."),
        "rules": ("config", "List the rules that findings refer to by code."),
        "notify": ("notify", "Test the notifications."),
        "render": ("submit", "Print the command line or script that launches a config."),
        "completion": ("config", "Print the shell completion script."),
    },
}
# What people type who know other tools. Help pages do not list them.
ALIASES = {"ps": "list", "ls": "list", "kill": "cancel", "stop": "cancel", "run": "submit"}
MODULE_OF = {verb: module for verbs in VERBS.values() for verb, (module, _) in verbs.items()}


class LazyGroup(click.Group):
    def list_commands(self, context: click.Context) -> list[str]:
        return list(MODULE_OF)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in MODULE_OF:
            return None
        # The group is imported first, so it cannot import the verbs itself without a cycle.
        module = import_module(f"gptctl.cli.{MODULE_OF[name]}")
        # A function called `list` would hide the builtin in its module; `import` is a keyword.
        found = getattr(module, f"{name}_verb" if name in ("list", "eval", "import") else name)
        assert isinstance(found, click.Command)
        return found

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        args = [ALIASES.get(args[0], args[0]), *args[1:]]
        # click compares with the verbs it has loaded, and here it has loaded none.
        if args[0][:1] != "-" and args[0] not in MODULE_OF and not context.resilient_parsing:
            near = closest(args[0], MODULE_OF)
            hint = f"did you mean `gptctl {near[0]}`?" if near else "`gptctl --help` lists commands"
            raise UserError(f"no such command: {args[0]}", hint, WRONG_USAGE)
        return super().resolve_command(context, args)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        # One width for all sections: their summaries start in the same column.
        width = max(map(len, MODULE_OF))
        for section, verbs in VERBS.items():
            with formatter.section(section):
                rows = [(verb.ljust(width), summary) for verb, (_, summary) in verbs.items()]
                formatter.write_dl(rows)

    def shell_complete(self, context: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete the name of a verb without importing the verbs."""
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
    # \b keeps the line breaks. `options.examples` is not used here: importing it costs start-up.
    epilog="\b\nExamples:\n  gptctl init\n  gptctl validate config\n"
    "  gptctl submit --nodes 2 --follow",
)
@click.version_option(__version__, prog_name="gptctl")
@click.pass_context
def cli(context: click.Context) -> None:
    """Launch distributed GPT training jobs from one run config and a cluster profile."""
    from gptctl.cli.session import Session

    context.obj = Session()


def main() -> None:
    """Run gptctl. Only here do exceptions become messages and exit codes."""
    _make_streams_safe()
    try:
        code = _run()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader (head, less) has exited: print nothing
        code = BROKEN_PIPE
    except OSError as error:
        code = WRONG_USAGE
        with suppress(OSError):
            what = (
                f"cannot access {error.filename}" if error.filename else "cannot write the output"
            )
            print(f"error: {what}: {error.strerror}", file=sys.stderr)
    _abandon_broken_streams()
    # Skip the interpreter's clean-up: it takes a tenth of the time of a short command.
    os._exit(code)


def _make_streams_safe() -> None:
    """Replace closed streams by /dev/null; escape characters that the terminal cannot show."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (lives as long as the process)
        getattr(sys, name).reconfigure(errors="backslashreplace")


def _abandon_broken_streams() -> None:
    """Redirect streams that cannot be flushed, so that they do not change the exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _run() -> int:
    code = _run_verb()
    _name_damaged_files()
    return code


def _name_damaged_files() -> None:
    """Say which files were ignored because they are damaged; each is named once."""
    # Whoever read files has loaded this module: other verbs must not pay for it.
    reading = sys.modules.get("gptctl.engine.file_reading")
    if reading and reading.noticed:
        from gptctl.cli import ui
        from gptctl.jobs.damage import new_notes

        for note in new_notes(reading.noticed):
            ui.say(f"note: {note}")


def _run_verb() -> int:
    try:
        code = cli(prog_name="gptctl", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except SystemExit:  # click raises it on a broken pipe
        return BROKEN_PIPE
    except click.ClickException as error:
        return _report(_usage_error(error))
    except UserError as error:
        return _report(error)
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except OSError:  # `main` reports it: flushing stdout can raise it, too
        raise
    except Exception as error:
        return _report_bug(error)


def _usage_error(error: click.ClickException) -> UserError:
    """Convert what click found wrong with the arguments to an error of our form."""
    from trainer.errors import one_of

    context = getattr(error, "ctx", None)  # click does not always set it
    verb = [word for word in sys.argv[1:2] if word in MODULE_OF or word in ALIASES]
    command = context.command_path if context else " ".join(["gptctl", *verb])
    help_page = f"see `{command} --help`"
    alike = getattr(error, "possibilities", None)
    # click appends what it found similar to the message; ours has it in the hint.
    text = error.message if alike else error.format_message()
    hint = f"did you mean {one_of(alike)}? {help_page}" if alike else help_page
    return UserError(text[:1].lower() + text[1:].removesuffix("."), hint, WRONG_USAGE)


def _report(error: UserError) -> int:
    from gptctl.cli import ui

    # A program that asked for JSON must be able to parse errors, too.
    if "--json" in sys.argv:
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
