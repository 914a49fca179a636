"""The verb `list`: which jobs there are, filtered, sorted and measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gptctl.cli.options import as_json_option, examples, filter_options, moment
from gptctl.cli.session import Session
from gptctl.cli.table_layout import Column

if TYPE_CHECKING:
    from gptctl.backends import JobState
    from gptctl.jobs.disk_use import DiskUse
    from gptctl.jobs.listed_jobs import ListedJobs
    from gptctl.jobs.selection import Filters, Order
    from gptctl.jobs.store import JobRecord

# The columns of `list`. The reason is last: it is the longest, and often empty.
LIST_COLUMNS = (
    Column("job"),
    Column("state"),
    Column("done", importance=1),
    Column("step", importance=7),
    Column("loss", importance=6),
    Column("tokens/s", importance=11),
    Column("time", importance=8),
    Column("left", importance=5),
    Column("ranks", importance=12),
    Column("cluster", importance=10),
    Column("created", importance=9),
    Column("from", importance=4),
    Column("size", importance=14),
    Column("tags", "cut", importance=3),
    Column("note", "cut", importance=13),
    Column("reason", "cut", importance=2),
)
OPTIONAL = ("from", "size", "tags", "note")  # columns that are left out if they are empty
# The columns that show by what the rows are sorted.
COLUMN_OF = {"duration": "time", "name": "job"}
RECENT = 20  # jobs that `list` shows: the state of each may need a query
LIST_TIMEOUT = 3.0  # seconds that `list` waits for other machines: people look at it often
SIZE_TIMEOUT = 10.0  # seconds for the bytes of all folders


@click.command(
    "list",
    epilog=examples(
        "gptctl list",
        "gptctl list --state FAILED --state TIMEOUT --since 7d",
        "gptctl list --tag exp=lr --sort loss --limit 5 --json",
    ),
)
@click.option(
    "--all",
    "show_all",
    is_flag=True,
    help=f"Show all jobs, also removed ones, not only the last {RECENT}.",
)
@filter_options
@click.option(
    "--since", type=moment, metavar="TIME", help="Only jobs submitted since: 7d, 12h, 2026-11-01."
)
@click.option(
    "--sort",
    metavar="KEY",
    help="Sort by created, state, loss, tokens/s, duration, size or name; -KEY: descending.",
)
@click.option(
    "--limit", type=click.IntRange(min=1), metavar="N", help="Show at most N of these jobs."
)
@click.option("--size", "with_size", is_flag=True, help="Show the bytes of the run folders here.")
@click.option(
    "--prometheus",
    "prometheus_folder",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Write the numbers to a file in DIR, for Prometheus's node_exporter.",
)
@as_json_option
@click.pass_obj
def list_verb(
    session: Session,
    show_all: bool,
    states: tuple[str, ...],
    tags: tuple[str, ...],
    clusters: tuple[str, ...],
    since: float | None,
    sort: str | None,
    limit: int | None,
    with_size: bool,
    prometheus_folder: Path | None,
    as_json: bool,
) -> None:
    """List jobs and their states.

    The newest job comes last. Options that filter search all jobs that were not removed; --all
    also searches removed ones. A repeated --tag means both tags, a repeated --state or --cluster
    either. The column `from` has the hash of the job that a job continues. Hosts and schedulers
    have 3 seconds to answer; of the others it shows the last known state, as in `RUNNING (12 min
    ago)`.
    """
    from gptctl.cli import ui
    from gptctl.jobs.labels import parse_tags
    from gptctl.jobs.selection import Filters, parse_order, parse_states

    filters = Filters(tuple(parse_tags(tags)), clusters, since, parse_states(states))
    order = parse_order(sort) if sort is not None else None
    if limit is None and not (show_all or filters.words()):
        limit = RECENT
    listing = Listing(session, filters, order, limit, show_all)
    rows = listing.rows(with_size)
    session.report_damage()
    # JSON has the plain numbers; the columns of the table are formatted for people.
    if prometheus_folder:
        from gptctl.cli.prometheus import write_prometheus

        write_prometheus(session, rows, prometheus_folder)
    elif as_json:
        ui.print_json(rows)
    else:
        print_rows(listing, rows)
    if listing.nearest:
        more = f"; --all also searches {listing.hidden:,} removed jobs" if listing.hidden else ""
        ui.say(f"no job matches {' '.join(filters.words())}: {listing.nearest}{more}")


class Listing:
    """Finds the rows. Whatever costs something is asked only of jobs that remain."""

    def __init__(
        self,
        session: Session,
        filters: Filters,
        order: Order | None,
        limit: int | None,
        with_removed: bool,
    ) -> None:
        # First: it limits what backends may do.
        self._deadline = session.end_within(LIST_TIMEOUT)
        self._session, self._filters, self.order = session, filters, order
        self._limit, self._with_removed = limit, with_removed
        self._kept: ListedJobs | None = None
        self._states: dict[str, JobState] = {}
        self._sizes: dict[str, DiskUse] = {}
        self.nearest = ""  # why no job is left
        self.more = 0  # jobs beyond the limit that match, of all jobs if none were filtered

    @property
    def is_plain(self) -> bool:
        """Whether only the newest jobs are asked for."""
        return not (self._filters.words() or self.order or self._with_removed)

    @property
    def hidden(self) -> int:
        """The number of jobs that were not searched."""
        store = self._session.store
        return 0 if self._with_removed else len(store.ids()) - len(store.present_ids())

    def rows(self, with_size: bool) -> list[dict[str, Any]]:
        from gptctl.jobs.selection import RECORD_VALUES, ROW_VALUES

        records = self._records()
        key = self.order.key if self.order else None
        if self.order and key in RECORD_VALUES:
            records = self.order.sorted(records, RECORD_VALUES[key])
        elif self.order and key == "size":
            # First: counting may take longer than other machines have to answer.
            self._ask(records)
            self._measure(records)
            records = self.order.sorted(records, lambda record: self._bytes(record.id))
        # What is sorted by a value of its row is cut when the rows are known.
        if key not in ROW_VALUES:
            records = self._cut(records)
        self._ask(records)
        rows = self._rows_of(records)
        if self.order and key in ROW_VALUES:
            rows = self._cut(self.order.sorted(rows, ROW_VALUES[key]))
        if with_size:
            shown = {row["job"] for row in rows}
            self._measure([record for record in records if record.id in shown])
        return [{**row, **self._size_facts(row["job"])} for row in rows]

    def _rows_of(self, records: Sequence[JobRecord]) -> list[dict[str, Any]]:
        known = self._kept.known if self._kept else {}
        rows = [
            known[record.id].row if record.id in known else self._new_row(record)
            for record in records
        ]
        if self._kept:
            self._kept.keep(rows)
        return rows

    def _new_row(self, record: JobRecord) -> dict[str, Any]:
        from gptctl.jobs.job_status import row_in_state

        return row_in_state(record, self._states[record.id])

    def _records(self) -> list[JobRecord]:
        from gptctl.jobs.listed_jobs import ListedJobs
        from gptctl.jobs.selection import in_states, select

        store = self._session.store
        if self.is_plain:
            found = store.records(self._limit)
            self.more = len(store.ids()) - len(found)
            return found
        self._kept = ListedJobs(store)
        store.known = {name: each.record for name, each in self._kept.known.items()}
        selected = select(store, self._filters, self._with_removed)
        if selected.records and self._filters.states:
            self._ask(selected.records)
            selected = in_states(selected.records, self._states, self._filters.states)
        self.nearest = selected.nearest
        return selected.records

    def _cut(self, items: list[Any]) -> list[Any]:
        if self._limit is None or len(items) <= self._limit:
            return items
        self.more = len(items) - self._limit
        # In the order of their submission the last ones are the newest.
        return items[: self._limit] if self.order else items[-self._limit :]

    def _ask(self, records: Sequence[JobRecord]) -> None:
        """Ask for the states of these jobs, all at once: one query to Slurm answers for many."""
        from gptctl.backends import JobState

        if self._kept:
            self._kept.prepare(records)
            rows = {name: each.row for name, each in self._kept.known.items()}
            self._states |= {n: JobState(row["state"], row["reason"]) for n, row in rows.items()}
        left = [record for record in records if record.id not in self._states]
        if not left:
            return
        # Imported here: with the backends it takes longer than a list whose rows were kept.
        from gptctl.jobs import job_status

        self._states |= job_status.known_states(left, self._session.backends, self._deadline)

    def _measure(self, records: Sequence[JobRecord]) -> None:
        left = [record for record in records if record.id not in self._sizes]
        self._sizes |= measured(left)

    def _bytes(self, job: str) -> int | None:
        return self._sizes[job].bytes if job in self._sizes else None

    def _size_facts(self, job: str) -> dict[str, Any]:
        size = self._sizes.get(job)
        return {
            "size": size.bytes if size else None,
            "size_is_complete": size.is_complete if size else None,
        }


def measured(records: Sequence[JobRecord]) -> dict[str, DiskUse]:
    """Count the bytes of run folders, and show how far that is."""
    from gptctl.cli import ui
    from gptctl.deadline import Deadline
    from gptctl.jobs.disk_use import disk_use

    with ui.status_line() as show:
        found = disk_use(records, Deadline(SIZE_TIMEOUT), show)
    if not all(each.is_complete for each in found.values()):
        ui.say(
            f"sizes that begin with > are incomplete: not everything could be read within "
            f"{SIZE_TIMEOUT:.0f} seconds"
        )
    return found


def print_rows(listing: Listing, rows: Sequence[Mapping[str, Any]]) -> None:
    from gptctl.cli import ui

    texts = list(cells_of(rows))
    shown = [
        column
        for column in LIST_COLUMNS
        if column.name not in OPTIONAL or any(text[column.name] for text in texts)
    ]
    # What was asked for is shown in a narrow window, too.
    asked = {"size", COLUMN_OF.get(listing.order.key, listing.order.key) if listing.order else ""}
    shown = [each._replace(importance=0) if each.name in asked else each for each in shown]
    cells = [[text[column.name] for column in shown] for text in texts]
    ui.print_table(title_of(listing, rows), shown, cells)


def cells_of(rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, str]]:
    """The columns of rows, as people read them."""
    from gptctl.engine.error_text import one_line
    from gptctl.jobs.labels import LONGEST_NOTE, tags_text
    from gptctl.jobs.progress_text import list_cells, state_text
    from gptctl.jobs.store import short_id
    from gptctl.text import clock_time

    for row in rows:
        yield {
            **{name: row[name] for name in ("job", "cluster", "reason")},
            "state": state_text(row),
            **list_cells(row),
            "ranks": f"{row['nodes']} × {row['world_size'] // row['nodes']}",
            "created": clock_time(row["created"]),
            # The hash of the job that it continues: short, and enough for any command.
            "from": short_id(row["continues"]) if row["continues"] else "",
            "size": _size_text(row),
            "tags": tags_text(row["tags"]),
            "note": one_line(row["note"], LONGEST_NOTE) if row["note"] else "",
        }


def _size_text(row: Mapping[str, Any]) -> str:
    if row["size"] is None:
        return ""
    # Imported here: only --size needs what counts bytes, with its threads.
    from gptctl.jobs.disk_use import DiskUse

    return str(DiskUse(row["size"], row["size_is_complete"]))


def title_of(listing: Listing, rows: Sequence[Mapping[str, Any]]) -> str:
    """How many jobs are shown, what they take, and how to see the others."""
    from gptctl.text import count

    parts = [f"{count(len(rows), 'job')}{_total_text(rows)}"]
    if listing.is_plain and listing.more:
        parts.append(f"--all shows {listing.more:,} more, older or removed")
    elif listing.more:
        parts.append(f"--limit {len(rows) + listing.more} shows {listing.more:,} more")
    return "; ".join(parts)


def _total_text(rows: Sequence[Mapping[str, Any]]) -> str:
    measured_rows = [row for row in rows if row["size"] is not None]
    if not measured_rows:
        return ""
    from gptctl.jobs.disk_use import DiskUse, total_use

    sizes = [DiskUse(row["size"], row["size_is_complete"]) for row in measured_rows]
    return f", {total_use(sizes)}"
