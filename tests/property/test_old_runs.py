"""`gptctl rm --older` on forests of jobs. The oracle: the newest verified checkpoint that every run can be resumed from is
the same before and after, found by walking the folders."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from gptctl.backends import Backends
from gptctl.jobs.old_runs import Rules, old_runs
from gptctl.jobs.remove import remove
from gptctl.jobs.selection import Filters
from gptctl.jobs.store import JobRecord, Store
from tests.job_records import DAY, add_job


def resume_point(record: JobRecord, known: dict[str, JobRecord]) -> tuple[str, int] | None:
    """Where the newest verified checkpoint is, seen from the last job of a run."""
    while True:
        output = Path(record.output_dir)
        steps = [int(file.parent.name[5:]) for file in output.glob("step_*/*.verified")]
        if steps:
            return str(output), max(steps)
        if not record.continues:
            return None
        record = known[record.continues]


@pytest.mark.parametrize("seed", range(30))
def test_every_run_can_still_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setenv("GPTCTL_HOME", str(tmp_path / "home"))
    chance = random.Random(seed)
    known: dict[str, JobRecord] = {}
    for number in range(chance.randrange(3, 12)):
        before = chance.choice([*known.values()]) if known and chance.random() < 0.7 else None
        saved = {step: chance.random() < 0.5 for step in range(10, 10 + 10 * chance.randrange(3), 10)}
        facts = {"continues": before.id if before else ""}
        if before and chance.random() < 0.3:
            facts["output_dir"], saved = before.output_dir, {}
        name, state = f"gpt-{number:06x}", chance.choice(("COMPLETED", "FAILED", "LOST"))
        known[name] = add_job(tmp_path, name, state, chance.uniform(0, 60), saved, **facts)
    last = [record for name, record in known.items() if name not in {each.continues for each in known.values()}]
    points = [resume_point(record, known) for record in last]
    store, backends = Store(tmp_path / "home"), Backends(lambda text: None)
    moment = min(each.created for each in known.values()) + chance.uniform(0, 60) * DAY
    keep = chance.choice((0, 0, 2))
    found = old_runs(Rules(Filters(), moment, keep), store, backends)
    for record in found.removable:
        remove(record, backends)
    assert [resume_point(record, known) for record in last] == points
    newest = [*known.values()][len(known) - keep :]
    assert not {record.id for record in newest} & {record.id for record in found.removable}
    # Whatever stays although it is old has a reason; without one it is gone.
    ended = {record.id for record in known.values() if record.created + 60 < moment}
    assert {each.record.id for each in found.staying} | {each.id for each in found.removable} == ended
