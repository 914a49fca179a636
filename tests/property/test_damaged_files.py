"""One bad file never stops gptctl: stores and run folders with one file damaged, and every verb that reads them.

Oracles, for each case: no exception that a user does not understand; no verb takes 2 s of processor time or waits 20 s;
`list` shows all other jobs as before; the state of the damaged job is the true one, or one that says that it is not known;
nothing else is changed or removed; nothing reaches a terminal that could control it; JSON stays JSON.

A case is its number: `GPTCTL_CASE=123 pytest tests/property/test_damaged_files.py` repeats one.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from gptctl import cli
from gptctl.engine import file_reading
from gptctl.engine.admission import NeverStarts, waits_for
from gptctl.engine.job_result import LOST, PENDING, RUNNING, UNKNOWN
from gptctl.engine.machine_queue import MachineQueue, queue_folder
from gptctl.engine.processes import is_alive
from gptctl.engine.ranks_here import live_ranks
from gptctl.engine.run_folder import RunFolder
from gptctl.jobs.store import JobRecord, Store
from tests.damage import NO_FILES, TEXTS
from tests.property.recorded_jobs import WORLDS, World

MOST_WORK, MOST_WAITING = 2.0, 20.0  # seconds of processor time, and on the clock: machines are busy
BUG = 70
# A running job may have exited, and a waiting one may have started.
MAY_BECOME = {RUNNING: {PENDING}, PENDING: {RUNNING}}
NOT_KNOWN = {LOST, UNKNOWN}
# What depends on the moment at which one asks.
MOMENTARY = ("duration", "progress", "reason")

READERS = (
    "list|list --all|status V|status V --json|show V|show V --json|show V --script|show V Launch|logs V --tail 5|"
    "logs V --failed --json|logs V --list|logs V --metrics --json|logs V --errors|logs V --json|wait V --timeout 0|"
    "wait V --timeout 0 --json|rerun V --dry-run|resume V --dry-run|sweep list --json|sweep show|sweep show --json|"
    "sweep best --json|fetch V|plot V|diff V|diff V V --json|diff V V --all --code|stacks V|status|list --json|@queue|@admission|@ranks|"
    "tag V --json|list --tag exp=lr --tag best --sort -loss --size|rm --older 0s --tag exp --dry-run --json|cost V|cost --json|top|top V|top V --json|top --json|top V --at 1h --json"
).split("|")
WRITERS = "tag V exp=wd --add seen|cancel V|cancel V --now|rm V --yes|rm V --here --yes|rm V --yes --json".split("|")


class Case(NamedTuple):
    number: int
    world: str
    job: str
    file: Path
    damage: str
    verbs: tuple[str, ...]


class Hang(BaseException):
    """Not an Exception: nothing in gptctl may catch it."""


class Wrong(AssertionError):
    pass


# Corruptions: a function of the file, its content and a source of random numbers


def truncated(file: Path, data: bytes, chance: random.Random) -> None:
    file.write_bytes(data[: chance.randrange(max(1, len(data)))])


def flipped(file: Path, data: bytes, chance: random.Random) -> None:
    changed = bytearray(data or b"\0")
    for _ in range(chance.choice((1, 1, 2, 8))):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    file.write_bytes(changed)


def garbage(file: Path, data: bytes, chance: random.Random) -> None:
    file.write_bytes(chance.randbytes(chance.choice((1, 10, 5000))))


def zeroed(file: Path, data: bytes, chance: random.Random) -> None:
    file.write_bytes(b"\0" * len(data))


def partly_zeroed(file: Path, data: bytes, chance: random.Random) -> None:
    start = chance.randrange(max(1, len(data)))
    file.write_bytes(data[:start] + b"\0" * (len(data) - start))


def doubled(file: Path, data: bytes, chance: random.Random) -> None:
    file.write_bytes(data + data)


def controlling(file: Path, data: bytes, chance: random.Random) -> None:
    file.write_bytes(b"\x1b]0;x\x07\x1b[2J\r" + data + b"\x1b[31m\x9b\xff\n")


def long_line(file: Path, data: bytes, chance: random.Random) -> None:
    file.write_bytes(data + b"x" * 500_000)


def unreadable(file: Path, data: bytes, chance: random.Random) -> None:
    if os.getuid():  # root reads it anyway
        file.chmod(0)


def no_file(file: Path, data: bytes, chance: random.Random) -> None:
    NO_FILES[chance.choice(list(NO_FILES))](file)


def other_text(file: Path, data: bytes, chance: random.Random) -> None:
    file.write_bytes(chance.choice(list(TEXTS.values())))


def other_time(file: Path, data: bytes, chance: random.Random) -> None:
    moment = chance.choice((0, -1_000_000, 2**33, 10**11, -(2**31)))
    with contextlib.suppress(OSError, OverflowError):  # not every file system has such times
        os.utime(file, (moment, moment))


def stranger(file: Path, data: bytes, chance: random.Random) -> None:
    """Put something beside the file that gptctl has not written, under a name that it might have."""
    names = (
        "gpt-000000.json|gpt-000000.ff.pending|x.ended|x.removed|000000077.ticket|ranks.7.jsonl|node.7.exit|attempt-7"
    )
    more = "attempt-99999|workerlog.7|.token2|a\nb.json|\x1b[2J.json|-rf.json|.json|.pending|" + "x" * 60 + ".json"
    other = file.with_name(chance.choice(f"{names}|{more}".split("|")))
    kind = chance.random()
    if kind < 0.4:
        NO_FILES[chance.choice(list(NO_FILES))](other)
    else:
        other.write_bytes(data if kind < 0.7 else chance.choice(list(TEXTS.values())))


def missing(file: Path, data: bytes, chance: random.Random) -> None:
    file.unlink()


def wrong_value(file: Path, data: bytes, chance: random.Random) -> None:
    """Give one value of a JSON file another type, or one that is out of all bounds."""
    text = data.decode(errors="replace")
    lines = text.splitlines() if file.suffix == ".jsonl" else [text]
    number = chance.randrange(len(lines))
    try:
        value = json.loads(lines[number])
    except ValueError:
        other_text(file, data, chance)
        return
    holders = list(_holders(value))
    holder, key = chance.choice(holders) if holders else (None, None)
    if holder is None:
        other_text(file, data, chance)
        return
    if chance.random() < 0.1:
        del holder[key]
    else:
        holder[key] = "@@@"
    lines[number] = json.dumps(value).replace('"@@@"', chance.choice(VALUES))
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _holders(value: Any) -> Iterator[tuple[Any, Any]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(pairs):
        yield value, key
        yield from _holders(inner)


VALUES = (
    *("null", "true", "-1", "0", "1.5", "1e308", "-1e308", "NaN", "Infinity", "1e999", "-9223372036854775808"),
    *(
        "9223372036854775807",
        "9223372036854775808",
        "1" * 400,
        "1" * 5000,
        '""',
        '"x"',
        '"../../.."',
        '"/"',
        '"/dev/zero"',
    ),
    *(
        '"\\ud800"',
        '"\\u001b[2J\\n\\r\\u0000"',
        '"' + "x" * 200_000 + '"',
        '"\\u202e\\u0000/etc"',
        '".."',
        '"-rf"',
        '"@"',
    ),
    *("[]", "{}", "[[]]", '[{"a": [1]}]', '{"a": {"b": null}}', "[" * 90 + "]" * 90, "[" * 5000 + "]" * 5000),
    *('["x", "y"]', "[0, 1, 2]", '{"job": 5}', "4242", "2", "[null]", '["\\u0000"]'),
)

DAMAGES: tuple[Callable[[Path, bytes, random.Random], None], ...] = (
    *(
        stranger,
        stranger,
        truncated,
        flipped,
        garbage,
        zeroed,
        partly_zeroed,
        doubled,
        controlling,
        long_line,
        unreadable,
        no_file,
        no_file,
    ),
    *(other_text, other_text, other_time, missing, wrong_value, wrong_value, wrong_value, wrong_value, wrong_value),
)


# What is done in one case


class Laboratory:
    """The worlds, and what `list` says of them while they are whole."""

    def __init__(self, folder: Path) -> None:
        self.worlds: dict[str, World] = {}
        self._targets: dict[tuple[str, str], list[Path]] = {}
        self.rows: dict[str, dict[str, dict[str, Any]]] = {}
        for name, make in WORLDS.items():
            world = self.worlds[name] = make(folder / name)
            (world.folder / "precious").mkdir()
            (world.folder / "precious" / "thesis.tex").write_text("years of work\n")
            world.keep()  # before `list` settles the half-submitted job
            with world.entered():
                code, out, said = run("list --all --json")
                assert code == 0, said
            self.rows[name] = {row["job"]: row for row in json.loads(out)}
            world.restore()

    def short_case(self, number: int) -> Case:
        """A case for the installed command, which takes a while to start."""
        case = self.case(number)
        return case._replace(verbs=tuple(verb for verb in case.verbs if verb[0] != "@")[-1:])

    def case(self, number: int) -> Case:
        chance = random.Random(number)
        name = list(self.worlds)[number % len(self.worlds)]
        world = self.worlds[name]
        job = chance.choice(list(world.jobs))
        if (name, job) not in self._targets:
            self._targets[name, job] = targets(world, world.jobs[job])
        file = chance.choice(self._targets[name, job])
        # `list` and `status` tell the verdict; `list` reads all jobs, and takes longer.
        verbs = ["list --all --json" if chance.random() < 0.3 else "status V --json"]
        verbs += [chance.choice(READERS)] if chance.random() < 0.6 else []
        if chance.random() < 0.1:
            verbs.append(chance.choice(WRITERS))
        return Case(number, name, job, file, chance.choice(DAMAGES).__name__, tuple(verbs))

    def try_case(self, case: Case, call: Callable[[str], tuple[int, str, str]]) -> None:
        world = self.worlds[case.world]
        self._revive(world)
        damage = next(each for each in DAMAGES if each.__name__ == case.damage)
        with world.entered():
            damage(case.file, case.file.read_bytes(), random.Random(case.number))
            try:
                for verb in case.verbs:
                    job = world.jobs[case.job].id
                    answer = call(f"{verb} {job}" if verb.startswith("@") else verb.replace("V", job))
                    self._check_verb(case, verb, *answer)
                    if verb == "list --all --json":
                        self._check_list(case, world, *answer)
                    elif verb == "status V --json" and not answer[0]:
                        self._check_verdict(case, world, json.loads(answer[1]))
                self._check_others(case, world)
            finally:
                world.restore()

    def _revive(self, world: World) -> None:
        """Start processes again that a case has cancelled."""
        if world is not self.worlds["running"]:
            return
        for name in ("running", "waiting"):
            record = world.jobs[name]
            if not is_alive(record.handle):
                revive(world, name)

    def _check_list(self, case: Case, world: World, code: int, out: str, said: str) -> None:
        if code:
            raise Wrong(f"list exits with {code}: {said[-300:]}")
        seen = {row["job"]: row for row in json.loads(out, parse_constant=refuse)}
        victim = world.jobs[case.job].id
        for job, before in self.rows[case.world].items():
            if job != victim and _lasting(seen.get(job)) != _lasting(before):
                raise Wrong(f"{job} is another job, and was {_lasting(before)}; now {_lasting(seen.get(job))}")
        if unexpected := set(seen) - set(self.rows[case.world]) - {victim}:
            raise Wrong(f"unexpected jobs: {unexpected}")
        if victim in seen:
            self._check_verdict(case, world, seen[victim])

    def _check_verdict(self, case: Case, world: World, now: dict[str, Any]) -> None:
        before = self.rows[case.world].get(world.jobs[case.job].id)
        # The only copy of one number: nobody can tell that it was another one.
        is_number = case.file.suffix == ".exit" and file_reading.read_bytes(case.file, 100).strip().isdigit()
        if before and not (case.world == "orphans" and is_number):
            allowed = {before["state"]} | MAY_BECOME.get(before["state"], set()) | NOT_KNOWN
            if now["state"] not in allowed:
                raise Wrong(f"it was {before['state']}, and is {now['state']}: {now['reason'][:200]}")
            if now["run_dir"] != before["run_dir"] and os.path.lexists(now["run_dir"]):
                raise Wrong(f"its folder was {before['run_dir']}, and is {now['run_dir']}")
            if not now["reason"] and now["state"] in NOT_KNOWN:
                raise Wrong("not known, and no message says so")

    def _check_verb(self, case: Case, verb: str, code: int, out: str, said: str) -> None:
        if code not in (0, 1, 2, 3):
            raise Wrong(f"{verb} exits with {code}: {said[-300:]}")
        if "--json" in verb and out.strip():
            for text in [out] if out.lstrip()[:2] in ("{\n", "[\n", "[]") else out.splitlines():
                json.loads(text, parse_constant=refuse)
        # `--script` prints the scripts byte for byte, so that they can be saved and run.
        printed = said if "--script" in verb else out + said
        if found := re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", printed):
            raise Wrong(f"{verb} prints {found[0]!r}")

    def _check_others(self, case: Case, world: World) -> None:
        """Nothing but the job's own files may have been changed or removed."""
        own = world.jobs[case.job]
        others = [job for name, job in world.jobs.items() if name not in (case.job, "killed")]
        kept = [str(world.folder / "precious"), *(f"{job.local_dir}/" for job in others)]
        kept += [str(world.home / "jobs" / f"{job.id}.json") for job in others]
        for path, (mode, content, changed) in world.kept.items():
            is_kept = path.startswith(tuple(kept)) and not path.endswith(("reach.json", ".sync", "last-state.json"))
            if not is_kept or path == str(case.file) or mode >> 12 == 4:
                continue
            try:
                status = os.lstat(path)
            except FileNotFoundError:
                raise Wrong(f"{path} is missing; the job was {own.id}") from None
            if (status.st_size, status.st_mtime_ns, status.st_mode) != (len(content), changed, mode):
                raise Wrong(f"{path} has changed; the job was {own.id}")


def _lasting(row: dict[str, Any] | None) -> dict[str, Any] | None:
    return row and {name: value for name, value in row.items() if name not in MOMENTARY}


def refuse(name: str) -> None:
    raise Wrong(f"{name} is not JSON")


def revive(world: World, name: str) -> None:
    """Give a job a new supervisor: in its record, its claim and its ticket."""
    record = world.jobs[name]
    before = json.dumps(dict(record.handle))[1:-1]
    with world.entered():
        handle = world.sleeper(record)
    record = world.jobs[name] = record._replace(handle=handle)
    for file in (world.home / "jobs" / f"{record.id}.json", record.run_folder / "claim.json"):
        values = json.loads(file.read_bytes())
        if file.name == "claim.json":
            values = handle
        else:
            values["handle"] = handle
        file.write_text(json.dumps(values, indent=1) + "\n")
    assert before
    world.keep()


def targets(world: World, record: JobRecord) -> list[Path]:
    """The files that belong to a job: in its folder, in the store, of its sweep and its place in the queue."""
    own = [Path(path) for path in world.kept if path.startswith(f"{record.local_dir}/") and "/code/" not in path]
    own += [Path(path) for path in world.kept if Path(path).name.startswith(f"{record.id}.")]
    if record.array_dir:
        own += [Path(path) for path in world.kept if path.startswith((record.array_dir, f"{world.home}/sweeps"))]
    own += [Path(path) for path in world.kept if path.endswith(".ticket")]
    files = [file for file in own if file.is_file()]
    # Records count more than scripts: they are read by every verb.
    records = [
        file
        for file in files
        if file.suffix in (".json", ".pending", ".ended", ".removed", ".labels", ".exit", ".jsonl", ".ticket")
    ]
    return [*files, *records, *records]


def engine_reads(words: str) -> int:
    """What supervisors read of other jobs: their tickets, their results, their ranks."""
    name, job = words.split()
    folder = RunFolder(Store().find(job).run_folder) if Store().holds(job) else RunFolder("/nowhere")
    if name == "@queue":
        MachineQueue(queue_folder()).tickets()
    elif name == "@admission":
        with contextlib.suppress(NeverStarts):
            waits_for({"job": job, "when": "ok", "run_dir": str(folder.path)})
    else:
        live_ranks(folder)
    return 0


def run(words: str) -> tuple[int, str, str]:
    """Run a verb in this process, as `gptctl` does; raise what `gptctl` would report as a bug."""
    out, said = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace") for _ in range(2))
    file_reading.noticed.clear()
    with (
        mock.patch.object(sys, "argv", ["gptctl", *words.split()]),
        mock.patch.dict(os.environ, {"GPTCTL_DEBUG": "1"}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(said),
    ):
        signal.setitimer(signal.ITIMER_PROF, MOST_WORK)
        signal.setitimer(signal.ITIMER_REAL, MOST_WAITING)
        try:
            code = engine_reads(words) if words.startswith("@") else cli._run()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
    out.flush()
    said.flush()
    return code, *(stream.buffer.getvalue().decode() for stream in (out, said))  # type: ignore[attr-defined]


def run_program(words: str) -> tuple[int, str, str]:
    """Run the installed command; it has as much time as a verb, and a second to start."""
    command = [str(Path(sys.executable).with_name("gptctl")), *words.split()]
    before = os.times()
    done = subprocess.run(command, capture_output=True, timeout=MOST_WAITING, check=False)
    after = os.times()
    work = after.children_user + after.children_system - before.children_user - before.children_system
    if work > MOST_WORK + 1:
        raise Hang(f"{words} took {work:.1f} s")
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laboratory]:
    def on_alarm(number: int, frame: object) -> None:
        raise Hang(f"more than {MOST_WORK} s of work, or {MOST_WAITING} s of waiting")

    before = [signal.signal(number, on_alarm) for number in (signal.SIGALRM, signal.SIGPROF)]
    made = Laboratory(tmp_path_factory.mktemp("damage"))
    yield made
    for world in made.worlds.values():
        world.close()
    for number, handler in zip((signal.SIGALRM, signal.SIGPROF), before):
        signal.signal(number, handler)


def faults(laboratory: Laboratory, numbers: range, call: Callable[[str], tuple[int, str, str]] = run) -> list[str]:
    found = []
    chosen = os.environ.get("GPTCTL_CASE")
    for number in [int(chosen)] if chosen else numbers:
        case = laboratory.short_case(number) if call is run_program else laboratory.case(number)
        try:
            laboratory.try_case(case, call)
        except (Exception, Hang) as error:
            last = [f"{each.name}:{each.lineno}" for each in traceback.extract_tb(error.__traceback__)][-3:]
            where = f"{case.world} {case.job} {case.file.name} {case.damage} {case.verbs}"
            found.append(f"{number}: {where}: {type(error).__name__}: {str(error)[:300]} {last}")
    return found


def check(laboratory: Laboratory, numbers: range, call: Callable[[str], tuple[int, str, str]] = run) -> None:
    found = faults(laboratory, numbers, call)
    assert not found, f"{len(found)} of {len(numbers)}:\n" + "\n".join(found[:40])


def test_no_damaged_file_stops_a_verb(laboratory: Laboratory) -> None:
    """Oracles: see above."""
    check(laboratory, range(2000))


@pytest.mark.long
def test_no_damaged_file_stops_a_verb_in_100000_cases(laboratory: Laboratory) -> None:
    """Oracles: see above."""
    check(laboratory, range(100_000))


def test_no_damaged_file_stops_the_program(laboratory: Laboratory) -> None:
    """The same through the installed command; the codes that users see."""
    check(laboratory, range(100_000, 100_040), run_program)


@pytest.mark.long
def test_no_damaged_file_stops_the_program_in_500_cases(laboratory: Laboratory) -> None:
    """The same through the installed command."""
    check(laboratory, range(100_000, 100_500), run_program)


def test_a_damaged_file_is_named_once(laboratory: Laboratory) -> None:
    """Oracle: the path in what `list` and `status` say: in the first answer, in no later one, and again once it changed."""
    world = laboratory.worlds["local"]
    record = world.jobs["completed"]
    with world.entered():
        try:
            for text in ("{", "[" * 5000):
                (record.run_folder / "result.json").write_text(text)
                told = [
                    run(words)[2].count("result.json: ") for words in ("list", "list", f"status {record.id}", "list")
                ]
                assert told == [1, 0, 0, 0]
            (world.home / "jobs" / f"{record.id}.json").write_text("{")
            told = [run("list")[2].count("is damaged") for _ in range(3)]
            assert told == [1, 0, 0]
            assert len(list((world.home / "damaged").glob(f"{record.id}.json.*"))) == 1
        finally:
            world.restore()
