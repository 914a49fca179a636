"""The verb `trace`: shares of the time in what the profiler recorded, and files for Perfetto."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import click

from gptctl.cli.options import as_json_option, complete_job, examples
from gptctl.cli.session import Session, require_folder
from trainer.errors import ANSWER_IS_NO, WRONG_USAGE, UserError

if TYPE_CHECKING:
    from gptctl.traces.rank_profile import RankProfile
    from gptctl.traces.trace_search import TraceSet

MOST_RANKS = 100_000  # that are looked for; a damaged trace may name any number
MOST_ROWS = 32  # ranks in the table; of more, the slowest
MOST_SLOW = 3  # ranks that are named as the slowest
MOST_NAMED = 4  # traces that are named; JSON names all
IS_SLOW = 0.05  # above the median: less is within what repeated runs differ by
TITLES = {
    "matrix_products": "matrix products",
    "attention": "attention",
    "other_operators": "other operators",
    "communication": "communication",
    "host_gaps": "host gaps",
}


@click.command(
    epilog=examples(
        "gptctl trace gpt-3f9a2c",
        "gptctl trace gpt-3f9a2c --rank 3 --json",
        "gptctl trace gpt-3f9a2c --output all-ranks.json",
    )
)
@click.argument("job", required=False, shell_complete=complete_job)
@click.option(
    "--rank", "ranks", type=click.IntRange(min=0), multiple=True, help="Only this rank; repeatable."
)
@click.option(
    "--attempt", type=click.IntRange(min=0), metavar="K", help="Another attempt than the last."
)
@click.option(
    "--output", metavar="FILE", help="Also write the traces of all these ranks as one file."
)
@as_json_option
@click.pass_obj
def trace(
    session: Session,
    job: str | None,
    ranks: tuple[int, ...],
    attempt: int | None,
    output: str | None,
    as_json: bool,
) -> None:
    """Summarise the profile of a job, and name its traces.

    Shows how the time of the steps that `Profiler.scheduler` names was spent, by rank, and which
    ranks are the slowest. Copies the traces from other machines first. Open them in
    https://ui.perfetto.dev to see the timeline. JOB can also be the path of a trace, or of a folder
    with traces. Without JOB: the latest job of this folder, or else your latest.
    """
    from gptctl.cli import ui

    chosen = selected(found_traces(session, job), ranks, attempt)
    profiles, problems = read_all(chosen)
    problems += [] if ranks else missing_ranks(chosen, profiles)
    for problem in problems:
        ui.say(f"warning: {problem}")
    if not profiles:
        raise UserError("no trace can be read", "record the steps again", ANSWER_IS_NO)
    if output:
        write_output(chosen, profiles, Path(output))
    if as_json:
        ui.print_json(as_facts(chosen, profiles, problems, output))
        return
    print_summary(chosen, profiles)
    for line in closing_lines(chosen, profiles, output):
        ui.print_text(line)


def found_traces(session: Session, job: str | None) -> list[TraceSet]:
    from gptctl.cli import ui
    from gptctl.jobs.job_traces import job_traces
    from gptctl.traces.trace_search import find_traces

    if job is not None and "/" in job and not os.path.exists(job):
        raise UserError(f"{job} does not exist", "give a job, a trace, or its folder", WRONG_USAGE)
    if job is not None and os.path.exists(job):  # a path first, as in other commands
        return [given_file(Path(job))] if os.path.isfile(job) else find_traces(Path(job))
    record = session.find(job)
    require_folder(record)
    return job_traces(record, session.backend_of(record), ui.say, ui.progress)


def given_file(file: Path) -> TraceSet:
    """One trace, which may have any name."""
    from gptctl.traces.trace_search import TraceSet
    from trainer.trace_files import parse_trace_name

    name = parse_trace_name(file.name)
    rank, first, last = (name.rank, name.first, name.last) if name else (0, 0, 0)
    return TraceSet(file.parent, 0, first, last, {rank: file}, {})


def selected(found: Sequence[TraceSet], ranks: tuple[int, ...], attempt: int | None) -> TraceSet:
    """The last traces, or those of an attempt; of these ranks, if some are given."""
    from gptctl.cli import ui
    from gptctl.text import some_of

    if not found:
        raise UserError("there are no traces", "give a job, a trace, or its folder", WRONG_USAGE)
    fitting = [each for each in found if attempt in (None, each.attempt)]
    if not fitting:
        known = ", ".join(str(number) for number in dict.fromkeys(each.attempt for each in found))
        message = f"attempt {attempt} has no traces"
        raise UserError(message, f"attempts with traces: {known}", ANSWER_IS_NO)
    chosen = fitting[-1]
    if others := [f"{each.folder} steps {each.first}-{each.last}" for each in fitting[:-1]]:
        ui.say(f"there are also older traces: {some_of(others, 3)}")
    missing = [str(rank) for rank in ranks if rank not in chosen.files]
    if missing:
        known = some_of([str(rank) for rank in chosen.files], 20)
        message = f"no trace of rank {', '.join(missing)} in {chosen.folder}"
        raise UserError(message, f"ranks with traces: {known}", ANSWER_IS_NO)
    kept = {rank: file for rank, file in chosen.files.items() if not ranks or rank in ranks}
    return chosen._replace(files=kept)


def read_all(chosen: TraceSet) -> tuple[list[RankProfile], list[str]]:
    """Summarise all traces; also return why some could not be read."""
    from gptctl.cli import ui
    from gptctl.engine.file_reading import DamagedFile
    from gptctl.traces.rank_profile import read_profile
    from gptctl.traces.trace_reader import trace_size

    profiles, problems = [], []
    with ui.progress("reading traces", sum(map(trace_size, chosen.files.values()))) as done:
        for rank, file in chosen.files.items():
            try:
                profiles.append(read_profile(file, rank, done))
            except DamagedFile as error:
                problems.append(f"{file} is damaged: {error}")
            except OSError as error:
                problems.append(f"cannot read {file}: {error.strerror}")
    problems += [
        f"{each.file}: {each.invalid:,} events are invalid, and not counted"
        for each in profiles
        if each.invalid
    ]
    return profiles, problems


def missing_ranks(chosen: TraceSet, profiles: Sequence[RankProfile]) -> list[str]:
    """Name the ranks that wrote no trace, as a list of at most one message."""
    from gptctl.text import some_of

    world = min(max((each.world for each in profiles), default=0), MOST_RANKS)
    missing = [str(rank) for rank in range(world) if rank not in chosen.files]
    return [f"no trace of rank {some_of(missing, MOST_NAMED)}: see its log"] if missing else []


def write_output(chosen: TraceSet, profiles: Sequence[RankProfile], output: Path) -> None:
    from gptctl.cli import ui
    from gptctl.engine.file_reading import DamagedFile
    from gptctl.traces.merged_trace import write_merged
    from gptctl.traces.trace_reader import trace_size

    # Only those that could be read: half a trace would make the whole file useless.
    files = {each.rank: chosen.files[each.rank] for each in profiles}
    if any(os.path.exists(output) and output.samefile(file) for file in files.values()):
        raise UserError(f"{output} is one of the traces", "choose another file", WRONG_USAGE)
    try:
        with ui.progress(f"writing {output}", sum(map(trace_size, files.values()))) as done:
            write_merged(files, output, done)
    except DamagedFile as error:
        hint = "use --rank to leave out the trace that is damaged"
        raise UserError(f"cannot merge the traces: {error}", hint, WRONG_USAGE) from None
    except OSError as error:
        message = f"cannot write {output}: {error.strerror}"
        raise UserError(message, "choose another file", WRONG_USAGE) from None


def as_facts(
    chosen: TraceSet, profiles: Sequence[RankProfile], problems: list[str], output: str | None
) -> dict[str, Any]:
    return {
        "folder": str(chosen.folder),
        "attempt": chosen.attempt,
        "steps": [chosen.first, chosen.last],
        "shares": mean_shares(profiles),
        "step_time": fmean(each.step_time for each in profiles),
        "slowest": [
            {
                "rank": each.rank,
                "own_time": each.own_time,
                "above_median": above_median(each, profiles),
            }
            for each in slowest(profiles)
        ],
        "ranks": [each.as_json() for each in profiles],
        "memory_snapshots": [str(file) for file in chosen.memory.values()],
        "problems": problems,
        "output": output,
    }


def mean_shares(profiles: Sequence[RankProfile]) -> dict[str, float]:
    return {kind: fmean(each.shares()[kind] for each in profiles) for kind in TITLES}


def slowest(profiles: Sequence[RankProfile]) -> list[RankProfile]:
    """The ranks that spend most time on their own work: the others wait for them."""
    return sorted(profiles, key=lambda each: -each.own_time)[:MOST_SLOW]


def above_median(profile: RankProfile, profiles: Sequence[RankProfile]) -> float:
    """How much longer the own work of a rank takes than that of a typical one: 0.1 is 10 %."""
    return profile.own_time / median(each.own_time for each in profiles) - 1


def print_summary(chosen: TraceSet, profiles: Sequence[RankProfile]) -> None:
    from gptctl.cli import ui
    from gptctl.text import count

    shown = sorted(profiles, key=lambda each: -each.own_time)[:MOST_ROWS]
    rows = [row_of(each) for each in sorted(shown, key=lambda each: each.rank)]
    if len(profiles) > 1:
        shares = [percent(share) for share in mean_shares(profiles).values()]
        times = [seconds(fmean(each.step_time for each in profiles))]
        times.append(seconds(max(max_step(each) for each in profiles)))
        rows.append(["mean", *times, seconds(fmean(each.own_time for each in profiles)), *shares])
    steps = f"steps {chosen.first} to {chosen.last}" if chosen.last else "one trace"
    hidden = len(profiles) - len(shown)
    note = f"; the {len(shown)} slowest are shown" if hidden else ""
    title = f"{steps}, {count(len(profiles), 'rank')}{note}"
    columns = ["rank", "step", "longest", "own time", *TITLES.values()]
    ui.print_table(title, columns, rows)


def row_of(profile: RankProfile) -> list[str]:
    times = (profile.step_time, max_step(profile), profile.own_time)
    return [
        str(profile.rank),
        *(seconds(each) for each in times),
        *(percent(share) for share in profile.shares().values()),
    ]


def closing_lines(
    chosen: TraceSet, profiles: Sequence[RankProfile], output: str | None
) -> Iterator[str]:
    """What the table does not say: who is slow, and which files to open."""
    from gptctl.text import some_of

    for each in slowest(profiles):
        if (more := above_median(each, profiles)) > IS_SLOW:
            yield f"rank {each.rank} is slow: its own work takes {percent(more)} longer than usual"
    hidden = fmean(
        (each.all_communication - each.parts["communication"]) / each.seconds for each in profiles
    )
    if hidden > 0.001:
        yield f"communication behind computation, not counted above: {percent(hidden)} of the time"
    if chosen.memory:
        yield f"memory snapshots, for pytorch.org/memory_viz: {chosen.folder}"
    if output:
        yield f"all ranks in one timeline, for ui.perfetto.dev: {output}"
    names = some_of([os.path.basename(each.file) for each in profiles], MOST_NAMED)
    yield f"open in ui.perfetto.dev: {names}, in {chosen.folder}"


def max_step(profile: RankProfile) -> float:
    return max(profile.steps.values(), default=profile.seconds)


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def seconds(number: float) -> str:
    return f"{number:.3f} s" if number >= 1 else f"{1000 * number:.2f} ms"
