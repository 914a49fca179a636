"""What users do with a trained model: eval, generate, serve, export and import.

Each verb starts a program of the bundled trainer: here, or with --cluster or --detach as a job.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from gptctl.cli.options import (
    LaunchCommand,
    as_json_option,
    complete_job,
    examples,
    launch_options,
    layout_options,
    queue_option,
    trust_option,
)
from gptctl.cli.session import Session
from gptctl.cli.task_words import absolute, option_words, tokenizer_path
from trainer.errors import ANSWER_IS_NO, WRONG_USAGE, UserError

if TYPE_CHECKING:
    from gptctl.spec.check import Checked
    from trainer.config import Override

F = TypeVar("F", bound=Callable[..., Any])
GENERATION = (
    *("greedy", "top_k", "top_p", "temperature", "repetition_penalty", "min_length"),
    *("max_length", "num_return_sequences", "stop", "seed", "truncate"),
    "batch_size",
)
UNRECOVERABLE = 93  # how a program of the trainer exits after a mistake that it has explained


class TaskCommand(LaunchCommand):
    """A verb with options of its own, then those of jobs; nothing follows `--`."""

    program = ""
    refused: tuple[str, ...] = ("after", "max_restarts", "style", "requeue")

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        # Its own options first: those of jobs are the same for all verbs.
        own = [each for each in self.params if each.name in self.own_names]
        own = [each for each in own if isinstance(each, click.Option)]
        records = [record for each in own if (record := each.get_help_record(context))]
        with formatter.section("Options"):
            formatter.write_dl(records)
        super().format_options(context, formatter)

    @property
    def own_names(self) -> list[str]:
        from gptctl.cli.options import SECTIONS

        shared = {name for names in SECTIONS.values() for name in names}
        return [str(each.name) for each in self.params if each.name not in shared]


class Where(NamedTuple):
    """Where a task runs, as it was typed."""

    detach: bool
    dry_run: bool
    trust: bool
    queue: bool
    as_json: bool
    template: str | None
    flags: dict[str, Any]

    @property
    def is_job(self) -> bool:
        return self.detach or self.queue or bool(self.flags.get("cluster"))


def task_options(has_model: bool = True) -> Callable[[F], F]:
    """Add what all tasks share: the checkpoint, the config, and where to run."""

    def add(verb: F) -> F:
        options = [
            as_json_option,
            trust_option,
            click.option("--dry-run", is_flag=True, help="Print what would run; start nothing."),
            click.option("--detach", is_flag=True, help="Run it as a job, and return at once."),
            queue_option,
            launch_options,
            layout_options,
        ]
        if has_model:
            options += [
                click.option(
                    "-c", "--config", metavar="FILE", help="Read more keys from a run config."
                ),
                click.option(
                    "--step",
                    type=click.IntRange(min=0),
                    metavar="N",
                    help="Use the checkpoint of this step instead of the newest.",
                ),
                click.argument("model", metavar="CHECKPOINT|JOB", shell_complete=complete_job),
            ]
        for option in options:
            verb = option(verb)
        return verb

    return add


def where_of(arguments: dict[str, Any]) -> Where:
    """Take the options that say where a task runs out of its arguments."""
    names = ("detach", "dry_run", "trust", "queue", "as_json", "template")
    taken = {name: arguments.pop(name) for name in names}
    arguments.pop("script", None)
    for name in TaskCommand.refused:
        arguments.pop(name, None)
    return Where(**taken, flags=arguments)


def is_job(typed: dict[str, Any]) -> bool:
    """Whether a verb that works without the trainer's programs is to run as a job.

    Raises UserError if options of jobs were typed for work that is done here.
    """
    where = where_of(dict(typed))
    if where.is_job:
        return True
    context = click.get_current_context()
    given = [
        param.opts[0]
        for param in context.command.params
        if param.name in (*where.flags, "dry_run", "trust", "template") and typed.get(param.name)
    ]
    if given:
        hint = "add --detach, or --cluster NAME, to run it as a job"
        raise UserError(f"only jobs have {', '.join(given)}", hint, WRONG_USAGE)
    return False


def run_task(
    session: Session,
    verb: str,
    program: str,
    options: Sequence[str],
    typed: dict[str, Any],
    operands: Sequence[str] = (),
    check: Callable[[bool], None] = lambda sees_files: None,
) -> int:
    """Run a program of `trainer.tasks` with these arguments, where the user wants it.

    `check` is called before it starts, with whether its cluster has the files of this machine.
    """
    from gptctl.jobs.submit import this_site
    from gptctl.jobs.tasks import Task, check_task, seen_by
    from gptctl.jobs.trained_models import find_model

    name, step, config = (typed.pop(each, None) for each in ("model", "step", "config"))
    where = where_of(typed)
    model = find_model(name, step, session.store, session.backends) if name else None
    overrides, launch = _typed_overrides(where)
    words = (tuple(options), tuple(operands))
    task = Task(verb, program, model, *words, config, tuple(overrides))
    site = this_site()
    checked = check_task(task, launch, site, where.is_job)
    check(checked.cluster.sees_files)
    found = seen_by(task, checked, step, session.backends)
    if found is not task:
        checked = check_task(found, launch, site, where.is_job)
    return _as_job(session, checked, where) if where.is_job else _here(session, checked, where)


def _typed_overrides(where: Where) -> tuple[list[Override], list[Override]]:
    """Overrides of the program's keys, and those of Launch, which only gptctl reads."""
    from gptctl.cli.overrides import typed_overrides

    flags = dict(where.flags)
    overrides, variables = flags.pop("overrides"), flags.pop("variables")
    sbatch = flags.pop("sbatch_options")
    typed = typed_overrides(flags, overrides, variables, (), sbatch)
    of_launch = [each for each in typed if each.key.startswith("Launch.")]
    return [each for each in typed if each not in of_launch], of_launch


def _as_job(session: Session, checked: Checked, where: Where) -> int:
    from gptctl.cli.dependencies import start_conditions
    from gptctl.cli.submit import show_dry_run, submit_and_follow, templates_of
    from gptctl.jobs.submit import prepare, this_site
    from gptctl.spec.trust import settle_trust

    templates = templates_of(where.template, checked.path)
    conditions = start_conditions(session, checked, (), where.queue)
    stores = (session.store, session.backends, this_site())
    prepared = prepare(checked, *stores, templates=templates, conditions=conditions)
    if where.dry_run:
        show_dry_run(prepared, where.as_json, where.trust)
        return 0
    settle_trust(prepared.sources, where.trust)
    return submit_and_follow(session, prepared, where.as_json, not where.detach, False)


def _here(session: Session, checked: Checked, where: Where) -> int:
    from gptctl.cli import ui
    from gptctl.cli.trusting import announce_files, show_doubts
    from gptctl.jobs.submit import this_site
    from gptctl.jobs.tasks import foreground_script
    from gptctl.spec.trust import settle_trust

    script = foreground_script(checked, this_site(), session.backends)
    if where.dry_run:
        show_doubts(checked.sources, where.trust)
        ui.print_exactly(script)
        return 0
    settle_trust(checked.sources, where.trust)
    announce_files(checked.sources)
    ui.print_findings(checked.findings, to_stderr=True)
    return _run(script)


def _run(script: str) -> int:
    """Run a script with our terminal; return the exit code that gptctl would give."""
    from gptctl.engine.processes import clean_environment

    process = subprocess.Popen(["bash", "-c", script, "gptctl"], env=clean_environment())
    # The terminal sends Ctrl-C to both: the program decides what it means, and exits.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: process.send_signal(number))
    code = process.wait()
    return ANSWER_IS_NO if code == UNRECOVERABLE else code if code >= 0 else 128 - code


tokenizer_option = click.option(
    "--tokenizer", metavar="PATH", help="Use this tokenizer: bytes, its file, or its folder."
)


@click.command(
    "eval",
    cls=TaskCommand,
    epilog=examples(
        "gptctl eval gpt-3f9a2c wikitext.txt",
        "gptctl eval output/step_1000 lambada.jsonl --cloze --json",
        "gptctl eval gpt-3f9a2c wikitext.txt --cluster a800 --gpus-per-node 8",
    ),
)
@task_options()
@click.argument("file", required=False, type=click.Path())
@click.option("--cloze", is_flag=True, help="Predict the last word of each line, as LAMBADA does.")
@tokenizer_option
@click.pass_obj
def eval_verb(
    session: Session, /, file: str | None, cloze: bool, tokenizer: str | None, **typed: Any
) -> int:
    """Measure the perplexity or the cloze accuracy of a checkpoint.

    FILE is a text, or JSON lines with a `text` field; without it, Offline_Eval.eval_path of the
    config. Default: perplexity with overlapping windows, as for WikiText.
    """
    words = option_words(cloze=cloze, tokenizer=tokenizer_path(tokenizer), json=typed["as_json"])
    return run_task(session, "eval", "evaluate", words, typed, [absolute(file)] if file else [])


@click.command(
    cls=TaskCommand,
    epilog=examples(
        'gptctl generate gpt-3f9a2c "Once upon a time"',
        "gptctl generate output/step_1000 --prompts prompts.jsonl --greedy --json",
        "gptctl generate gpt-3f9a2c",
    ),
)
@task_options()
@click.argument("prompts", nargs=-1, metavar="[PROMPTS]")
@click.option(
    "--prompts", "file", metavar="FILE", help="Read prompts: lines, *.jsonl, - for stdin."
)
@click.option("--greedy", is_flag=True, help="Always take the most likely token.")
@click.option("--top-k", metavar="K", help="Sample from the K most likely tokens; 0: from all.")
@click.option("--top-p", metavar="P", help="Sample from the tokens with this total probability.")
@click.option("--temperature", metavar="T", help="Below 1: more likely text; above: more varied.")
@click.option("--repetition-penalty", metavar="R", help="Above 1: repeat less.")
@click.option("--min-length", metavar="N", help="Generate at least N tokens.")
@click.option("--max-length", metavar="N", help="Generate at most N tokens.")
@click.option("--num-return-sequences", metavar="N", help="Generate N texts for each prompt.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; repeatable.")
@click.option("--seed", type=int, metavar="N", help="Set the random seed; default: Global.seed.")
@click.option("--batch-size", metavar="N", help="Generate from N prompts at a time.")
@click.option("--truncate", is_flag=True, help="Use the end of a prompt that is too long.")
@tokenizer_option
@click.pass_obj
def generate(session: Session, /, prompts: tuple[str, ...], file: str | None, **typed: Any) -> int:
    """Generate text with a checkpoint.

    Without a prompt, asks for prompts if run in a terminal.
    """
    from gptctl.cli.prompts import check_prompts

    chosen = {name: typed.pop(name) for name in GENERATION}
    check_prompts(prompts, chosen["stop"])
    tokenizer = tokenizer_path(typed.pop("tokenizer"))
    source = absolute(file) if file and file != "-" else file
    words = option_words(**chosen, prompts=source, tokenizer=tokenizer, json=typed["as_json"])
    return run_task(session, "generate", "generate", words, typed, prompts)


@click.command(
    cls=TaskCommand,
    epilog=examples(
        "gptctl serve gpt-3f9a2c",
        "gptctl serve output/step_1000 --port 8080 --host 0.0.0.0 --token-file ~/.serve-token",
    ),
)
@task_options()
@click.option("--port", type=click.IntRange(0, 65535), metavar="N", help="Listen on this port.")
@click.option("--host", metavar="ADDRESS", help="Listen on this address; default: 127.0.0.1.")
@click.option("--token-file", metavar="FILE", help="Accept only requests with this token.")
@tokenizer_option
@click.pass_obj
def serve(
    session: Session,
    /,
    port: int | None,
    host: str | None,
    token_file: str | None,
    tokenizer: str | None,
    **typed: Any,
) -> int:
    """Serve completions of a checkpoint over HTTP, to try a model.

    The endpoint is compatible with OpenAI's completions, and has a page for the browser. For real
    use, export the model for an inference server.
    """
    words = option_words(port=port, host=host, token_file=token_file and absolute(token_file))
    words += option_words(tokenizer=tokenizer_path(tokenizer))
    return run_task(session, "serve", "serve", words, typed)


@click.command(
    cls=TaskCommand,
    epilog=examples(
        "gptctl export gpt-3f9a2c --output gpt-hf",
        "gptctl export output/step_1000 --output gpt-hf --dtype bfloat16",
    ),
)
@task_options()
@click.option("--output", required=True, metavar="DIR", help="Write to this new folder.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16", "bfloat16"]),
    help="Set the type of the weights; default: float32.",
)
@click.option("--max-shard-size", metavar="SIZE", help="Split the weights into files of this size.")
@tokenizer_option
@click.pass_obj
def export(session: Session, /, output: str, **typed: Any) -> int:
    """Export a checkpoint as a folder that Hugging Face's GPT-2 loads."""
    chosen = {name: typed.pop(name) for name in ("dtype", "max_shard_size")}
    tokenizer = tokenizer_path(typed.pop("tokenizer"))
    words = option_words(output=absolute(output), **chosen, tokenizer=tokenizer)
    words += option_words(json=typed["as_json"])
    return run_task(session, "export", "export_weights", words, typed)


@click.command(
    "import",
    cls=TaskCommand,
    epilog=examples(
        "gptctl import gpt2/ --output gpt2-checkpoint > model.yaml",
        "gptctl submit -o Engine.save_load.ckpt_dir=gpt2-checkpoint --follow",
    ),
)
@task_options(has_model=False)
@click.argument("source", type=click.Path())
@click.option("--output", required=True, metavar="CHECKPOINT", help="Write to this new folder.")
@click.option("--megatron-version", metavar="N", help="Set checkpoint_version, if it is missing.")
@click.pass_obj
def import_verb(
    session: Session, /, source: str, output: str, megatron_version: str | None, **typed: Any
) -> int:
    """Import weights of GPT-2: Hugging Face, nanoGPT or Megatron names.

    SOURCE is a folder, or a *.safetensors, *.bin or *.pt file. Prints the Model section for configs
    that start from the weights. `-o Model.KEY=VALUE` sets what the source does not tell.
    """
    words = option_words(output=absolute(output), megatron_version=megatron_version)
    words += option_words(json=typed["as_json"])
    return run_task(session, "import", "import_weights", words, typed, [absolute(source)])
