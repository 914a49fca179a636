"""The job store, the run folder and the processes of a job, each alone. Oracles: files, and processes of this machine."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import time
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gptctl.backends import Backends, JobState
from gptctl.cli.chain import Chain
from gptctl.cli.dependencies import unmet
from gptctl.cli.jobs import cancel_records
from gptctl.engine import ports, processes
from gptctl.engine.job_result import COMPLETED, FAILED, STOPPED
from gptctl.engine.processes import (
    clean_environment,
    descendants,
    is_alive,
    is_here,
    kill_all,
    processes_of,
    this_process,
)
from gptctl.engine.run_folder import RunFolder
from gptctl.jobs import job_status
from gptctl.jobs.freeze import frozen_config, imported_beside
from gptctl.jobs.git_state import git_state
from gptctl.jobs.history import History
from gptctl.jobs.remove import remove_tree
from gptctl.jobs.store import JobRecord, Store, matching_ids, new_record
from gptctl.jobs.submit import Submitted, finish_interrupted_submits, prepare
from gptctl.planning.build import Site
from gptctl.spec.check import check_config
from trainer.config import Override
from trainer.errors import UserError


def record(name: str = "gpt-1", **facts) -> JobRecord:
    where = {"local_dir": f"/nowhere/{name}", "log_dir": "/nowhere/logs", "nodes": 1, "per_node": 1, "world": 1}
    return new_record(id=name, name="gpt", cluster="local", kind="local", token="t", **{**where, **facts})


def test_an_id_is_given_once_and_taken_back_only_by_its_owner(tmp_path) -> None:
    store = Store(tmp_path)
    first, second = record(), record()._replace(token="u")
    assert store.add(first)
    assert not store.add(second)
    store.remove(second)
    assert store.find("gpt-1") == first
    assert [each.token for each in store.pending()] == ["t"]
    store.accept(first)
    assert store.pending() == []
    store.remove(first)
    assert store.ids() == []


def test_a_submit_that_is_going_on_is_left_alone(tmp_path) -> None:
    """The submitter is this process; a dead one in its place, and the job is taken back."""
    store = Store(tmp_path)
    store.add(record("gpt-1"))
    dead = record("gpt-2")
    store.add(dead._replace(submitter={**dead.submitter, "pid": 2**22 + 1}))
    elsewhere = record("gpt-3")
    store.add(elsewhere._replace(submitter={"pid": 1, "host": "elsewhere", "boot": "another"}))
    unknown = record("gpt-4", local_dir="/nowhere/4")._replace(
        kind="cloud", submitter={**dead.submitter, "pid": 2**22 + 1}
    )
    store.add(unknown)
    assert [note.split()[0] for note in finish_interrupted_submits(store, Backends(print))] == ["gpt-2"]
    assert set(store.ids()) == {"gpt-1", "gpt-3", "gpt-4"}


def test_a_job_that_was_abandoned_halfway_is_taken_back_all_the_same(tmp_path) -> None:
    """A gptctl was killed between deciding that the job never starts, and removing its folder."""
    store, run = Store(tmp_path / "home"), tmp_path / "runs" / "gpt-1"
    run.mkdir(parents=True)
    (run / ".token").write_text("t")
    half = record(local_dir=str(run))
    store.add(half._replace(submitter={**half.submitter, "pid": 2**22 + 1}))
    assert RunFolder(run).try_claim({"abandoned": True})
    finish_interrupted_submits(store, Backends(print))
    assert (store.ids(), store.pending(), run.exists()) == ([], [], False)


def test_tidying_removes_old_leftovers_and_no_records(tmp_path) -> None:
    store = Store(tmp_path)
    store.add(record("my.part1-abc"))
    store.add(record("x.json.part7"))
    old = time.time() - 7200
    for name in (".gpt-1.123", "gpt-1.json.part99"):
        (store.folder / name).write_text("")
        (store.folder / f"{name}0").write_text("")
        os.utime(store.folder / name, (old, old))
    for file in store.folder.glob("*.json"):
        os.utime(file, (old, old))
    store.remove_temporary_files()
    assert sorted(store.ids()) == ["my.part1-abc", "x.json.part7"]
    assert {file.name for file in store.folder.iterdir() if ".part99" in file.name or file.name.startswith(".")} == {
        ".gpt-1.1230",
        "gpt-1.json.part990",
    }


def test_a_record_that_cannot_be_read_for_a_moment_stays(tmp_path, monkeypatch) -> None:
    """ESTALE of a network file system: a mock, since no local file system has it."""
    store = Store(tmp_path)
    store.add(record())

    def stale(*arguments):
        raise OSError(116, "Stale file handle")

    with monkeypatch.context() as patched:
        patched.setattr("gptctl.jobs.store.os.open", stale)
        assert store.records() == []
    assert "cannot be read: Stale file handle" in store.damaged[0]
    assert len(store.records()) == 1


def test_a_process_is_known_by_more_than_its_number() -> None:
    me = this_process()
    assert is_alive(me)
    assert not is_alive({**me, "started": me["started"] + 1})
    assert not is_alive({**me, "boot": "another"})
    assert is_here({**me, "host": "renamed since"})
    assert not is_here({**me, "boot": "another", "host": "elsewhere"})
    child = subprocess.Popen([sys.executable, "-c", ""])
    time.sleep(0.5)
    assert not is_alive({**me, "pid": child.pid})  # ended, and not waited for
    child.wait()


def test_processes_of_a_job_are_found_by_their_environment_or_descent(tmp_path) -> None:
    run_dir = str(tmp_path)
    marked = subprocess.Popen(["sleep", "60"], env={"GPTCTL_RUN_DIR": run_dir})
    other = subprocess.Popen(["sleep", "60"], env={"GPTCTL_RUN_DIR": f"{run_dir}-2", "X_GPTCTL_RUN_DIR": run_dir})
    try:
        assert processes_of(run_dir) == [marked.pid]
        assert {marked.pid, other.pid} <= set(descendants(os.getpid()))
        assert kill_all(run_dir) == []
        assert (marked.wait(5), other.poll()) == (-9, None)
    finally:
        other.kill()
        other.wait()


def test_one_empty_listing_does_not_prove_that_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that forks and exits all the time is in some listings only. How often is chance, so they are made up."""
    listings = iter([[7], [], [], [8], *[[]] * 9, [9], *[[]] * 10])
    killed: list[int] = []
    monkeypatch.setattr(processes, "jobs_processes", lambda *_: next(listings))
    monkeypatch.setattr(processes, "send", lambda pid, _: killed.append(pid))
    assert kill_all(str(tmp_path)) == []
    assert killed == [7, 8, 9]
    endless = cycle([[7], []])
    monkeypatch.setattr(processes, "jobs_processes", lambda *_: next(endless))
    assert kill_all(str(tmp_path), timeout=0.1) == [7]


@pytest.mark.parametrize(
    ("codes", "nnodes", "hopeless", "stopped", "expected"),
    [
        ({0: 0, 1: 0}, "2", False, False, COMPLETED),
        ({0: 0, 1: 1}, "2", False, False, FAILED),
        ({0: 0, 1: 1}, "1:2", False, False, COMPLETED),  # enough nodes were left
        ({0: 1, 1: 1}, "1:2", False, False, FAILED),
        ({0: 0, 1: 1}, "2:3", False, False, FAILED),
        ({0: 0, 1: 1}, "1:2", True, False, FAILED),  # a rank has said that it cannot be helped
        ({0: 1}, "1", False, True, STOPPED),
        ({0: 0}, "1", False, True, COMPLETED),
    ],
)
def test_one_verdict(tmp_path, codes, nnodes: str, hopeless: bool, stopped: bool, expected: str) -> None:
    folder = RunFolder(tmp_path)
    folder.attempt(0).mkdir()
    if hopeless:
        (folder.attempt(0) / "unrecoverable").touch()
    (tmp_path / "status.json").write_text(json.dumps({"state": "stopped" if stopped else "failed", "time": 100.0}))
    assert folder.attempt_result(0, codes, nnodes, str(tmp_path), since=50.0).state == expected


def test_a_stop_of_an_earlier_attempt_does_not_count(tmp_path) -> None:
    folder, here = RunFolder(tmp_path / "gpt-1"), str(tmp_path)
    (tmp_path / "status.json").write_text('{"state": "stopped", "time": 100.0}')
    assert folder.has_stopped_on_purpose(0, here, since=99.0)
    assert not folder.has_stopped_on_purpose(0, here, since=101.0)
    assert not folder.has_stopped_on_purpose(0, str(tmp_path / "missing"), since=0.0)
    for moment in ('"soon"', "null", "NaN", "1e400"):
        (tmp_path / "status.json").write_text(f'{{"state": "stopped", "time": {moment}}}')
        assert not folder.has_stopped_on_purpose(0, here, since=0.0)


def test_a_clock_that_was_set_back_does_not_turn_a_clean_stop_into_a_failure(tmp_path) -> None:
    """The trainer records which attempt it belongs to: whatever time it writes, that one stopped on purpose."""
    folder, status = RunFolder(tmp_path / "gpt-1"), {"state": "stopped", "time": 100.0, "job": "gpt-1", "attempt": 2}
    (tmp_path / "status.json").write_text(json.dumps(status))
    result = folder.attempt_result(2, {0: 1}, "1", str(tmp_path), since=5000.0)
    assert result.state == STOPPED
    assert not folder.has_stopped_on_purpose(1, str(tmp_path), since=0.0)
    assert not RunFolder(tmp_path / "gpt-2").has_stopped_on_purpose(2, str(tmp_path), since=0.0)


def test_attempts_are_numbered_on_whatever_becomes_of_their_folders(tmp_path) -> None:
    folder = RunFolder(tmp_path)
    assert [folder.begin_attempt() for _ in range(2)] == [0, 1]
    (tmp_path / "attempt-0").rmdir()
    (tmp_path / "attempt-1.bak").mkdir()
    (tmp_path / "attempt-1.bak/failed").touch()
    (tmp_path / "attempt-2").touch()
    assert folder.begin_attempt() == 3
    folder.record_failure(3)
    assert folder.num_failures() == 1


def test_a_result_that_makes_no_sense_is_none(tmp_path) -> None:
    folder = RunFolder(tmp_path)
    infinite = '{"state": "FAILED", "reason": "", "ended": 1e400}'
    for text in ("", "[]", '{"state": "DONE"}', '{"state": 5}', "[" * 100_000, infinite):
        (tmp_path / "result.json").write_text(text)
        assert folder.result() is None
    (tmp_path / "result.json").write_text('{"state": "COMPLETED", "attempts": "x", "reason": 5, "ended": "never"}')
    assert folder.result().reason == ""
    for ended in ("1e18", "-5", "null"):
        (tmp_path / "result.json").write_text(f'{{"state": "FAILED", "reason": "a\\nb", "ended": {ended}}}')
        assert folder.result()[:3] == ("FAILED", "a b", 0.0)


def test_a_port_in_use_is_not_chosen(monkeypatch) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        monkeypatch.setattr(ports, "PORTS", range(port, port + 1))
        with pytest.raises(OSError, match="no free port"):
            ports.free_port("127.0.0.1")


def test_paths_of_a_frozen_config_hold_in_any_folder(tmp_path) -> None:
    keys = [
        "Data.Train.dataset.input_dir=d",
        "Engine.save_load.output_dir=~/out",
        "Engine.save_load.ckpt_dir=auto",
        "Launch.log_dir=l",
        "Launch.files=[a]",
    ]
    checked = check_config(None, [Override.parse(key) for key in keys])
    frozen = frozen_config(checked, Site("/home/me", "python", "/t"))["resolved"]
    home = os.path.expanduser("~")
    assert frozen["Data"]["Train"]["dataset"]["input_dir"] == "/home/me/d"
    assert frozen["Engine"]["save_load"] == {
        **frozen["Engine"]["save_load"],
        "output_dir": f"{home}/out",
        "ckpt_dir": "auto",
    }
    assert (frozen["Launch"]["log_dir"], frozen["Launch"]["files"]) == ("/home/me/l", ["/home/me/a"])
    blend = check_config(None, [Override.parse("Data.Train.dataset.input_dir={a: 1, /b: 2.5}")])
    frozen = frozen_config(blend, Site("/home/me", "python", "/t"))["resolved"]
    assert frozen["Data"]["Train"]["dataset"]["input_dir"] == {"/home/me/a": 1.0, "/b": 2.5}
    assert list(blend.inputs.values()) == ["a", "/b"]
    assert frozen["Launch"]["entrypoint"] == "trainer"


def test_equal_jobs_have_equal_ids_and_others_have_not(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text("")
    site = Site(str(tmp_path), sys.executable, str(tmp_path))

    def base_id(*keys: str) -> str:
        script = Override("Launch.entrypoint", "x.py", "--")
        return prepare(
            check_config(None, [script, *map(Override.parse, keys)]), Store(tmp_path), Backends(print), site
        ).base_id

    assert base_id() == base_id()
    assert len({base_id(), base_id("Global.seed=7"), base_id("Launch.nodes=2"), base_id("Launch.env.A=1")}) == 4


def test_flags_win_over_overrides() -> None:
    from gptctl.cli.overrides import typed_overrides

    typed = typed_overrides({"nodes": "3", "devices": "0,1"}, ("Launch.nodes=2", "Launch.gpus_per_node=8"))
    checked = check_config(None, typed)
    assert (checked.launch.nodes, checked.machines.per_node) == (3, 2)
    assert checked.launch_origins["Launch.nodes"] == "--nodes 3"


def test_git_state(tmp_path) -> None:
    assert git_state(str(tmp_path)) == {}

    def git(*arguments: str) -> None:
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=b", *arguments],
            cwd=tmp_path,
            check=True,
            capture_output=True,
        )

    git("init", "-b", "trunk")
    (tmp_path / "file").write_text("one\n")
    git("add", ".")
    git("commit", "-m", "x")
    clean = git_state(str(tmp_path))
    assert (len(clean["commit"]), clean["branch"], clean["changed"], clean["diff"]) == (40, "trunk", [], "")
    (tmp_path / "file").write_text("two\n")
    changed = git_state(str(tmp_path))
    assert changed["changed"] == [" M file"]
    assert "+two" in changed["diff"]
    assert changed["diff_is_complete"]


def test_modules_beside_a_script_are_followed(tmp_path) -> None:
    (tmp_path / "main.py").write_text(
        "import os, a\nfrom pack.inner import x\ntry:\n    import missing\nexcept ImportError: pass\n"
    )
    (tmp_path / "a.py").write_text("def f():\n    import b\n")
    (tmp_path / "b.py").write_text("this is no python")
    (tmp_path / "unused.py").write_text("")
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "inner.py").write_text("import c\nx = 1")
    (tmp_path / "c.py").write_text("import main")
    assert {path.name for path in imported_beside(tmp_path / "main.py")} == {"a.py", "b.py", "pack", "c.py"}


@pytest.mark.parametrize(
    "code",
    ["x=" + "-" * 200_000 + "1", "x=a" + ".b" * 200_000, "import other\n" + "x = 1\n" * 200_000],
    ids=["too deep for the parser", "too deep for the tree", "too long"],
)
def test_a_script_that_cannot_be_parsed_imports_nothing(tmp_path, code: str) -> None:
    """Python fails on the first two with its own message, and a copy of the third can still list its modules."""
    (tmp_path / "main.py").write_text(code)
    (tmp_path / "other.py").write_text("")
    assert list(imported_beside(tmp_path / "main.py")) == []


def test_what_a_job_inherits(monkeypatch) -> None:
    monkeypatch.setattr(
        os,
        "environ",
        {"PATH": "p", "GPTCTL_HOME": "h", "GPTCTL_NODE": "1", "SLURM_X": "1", "RANK": "1", "PYTHONPATH": "a:/b"},
    )
    kept = clean_environment()
    assert kept == {"PATH": "p", "GPTCTL_HOME": "h", "PYTHONPATH": f"{Path('a').absolute()}:/b"}


def test_which_jobs_a_word_may_mean() -> None:
    """The id, its start or its hash; what is exact wins, and the rest is ambiguous."""
    ids = ["gpt-3f9a2c", "gpt-3f9a2c-2", "char-3f9a2d", "char-000001", "abcd-3f9a2e"]
    assert matching_ids("gpt-3f9a2c", ids) == ["gpt-3f9a2c"]
    assert matching_ids("3f9a2c", ids) == ["gpt-3f9a2c"]
    assert matching_ids("3f9a2c-2", ids) == ["gpt-3f9a2c-2"]
    assert matching_ids("3f9a", ids) == ["gpt-3f9a2c", "gpt-3f9a2c-2", "char-3f9a2d", "abcd-3f9a2e"]
    assert matching_ids("3f9", ids) == []
    assert matching_ids("char", ids) == ["char-3f9a2d", "char-000001"]
    assert matching_ids("3f9a2c", [*ids, "big-3f9a2c"]) == ["gpt-3f9a2c", "big-3f9a2c"]


def test_a_complete_id_never_means_another_job() -> None:
    """If the record of a job is lost, the next job of the same config must not be removed in its place."""
    ids = ["gpt-3f9a2c-2", "gpt-3f9a2c-21", "char-3f9a2d"]
    for name in ("gpt-3f9a2c", "3f9a2c", "gpt-3f9a2c-1", "3f9a2c-1"):
        assert matching_ids(name, ids) == []
    assert matching_ids("gpt-3f9a2c-2", ids) == ["gpt-3f9a2c-2"]
    assert matching_ids("gpt-3f9a", ids) == ["gpt-3f9a2c-2", "gpt-3f9a2c-21"]


def test_an_ambiguous_hash_names_the_candidates(tmp_path) -> None:
    """A number can be a hash and an id of the scheduler, too."""
    store = Store(tmp_path)
    for each in (record("gpt-000001"), record("gpt-00abcd", handle={"scheduler_id": "000001"})):
        store.add(each)
    with pytest.raises(UserError) as error:
        store.find("000001")
    assert {"gpt-000001", "gpt-00abcd"} <= set(error.value.hint.replace(",", "").split())
    assert store.find("gpt-000001").id == "gpt-000001"


def test_the_latest_job_of_a_folder(tmp_path) -> None:
    """Records of older versions have no folder; removed jobs are never the latest."""
    store, history = Store(tmp_path), History(tmp_path)
    for number, folder in enumerate(["/a", "/b", ""]):
        store.add(record(f"gpt-{number}")._replace(folder=folder, created=number))
        os.utime(store.folder / f"gpt-{number}.json", (number, number))
    assert [store.latest(folder).id for folder in ("/a", "/b", "/c", "")] == ["gpt-0", "gpt-1", "gpt-2", "gpt-2"]
    history.mark_removed(store.find("gpt-2"), 5.0)
    history.mark_removed(store.find("gpt-1"), 5.0)
    assert [store.latest(folder).id for folder in ("/b", "/c")] == ["gpt-0", "gpt-0"]
    assert [each.id for each in store.records()] == ["gpt-0", "gpt-1", "gpt-2"]
    history.mark_removed(store.find("gpt-0"), 5.0)
    with pytest.raises(UserError, match="there are no jobs"):
        store.latest("/a")


def test_the_history_keeps_every_field_and_belongs_to_one_token(tmp_path) -> None:
    history, mine = History(tmp_path), record()
    history.keep(mine, {"state": FAILED})
    assert not history.folder.exists()  # nor is anything kept of a job that is not in the store
    Store(tmp_path).add(mine)
    history.keep(mine, {"state": FAILED, "reason": "rank 3", "new_field": [1]})
    assert history.state(mine) == {"state": FAILED, "reason": "rank 3", "new_field": [1]}
    assert history.state(mine._replace(token="u")) is None
    history.forget(mine)
    assert (history.state(mine), history.facts(mine), history.removed(mine)) == (None, {}, None)
    (history.folder / f"{mine.id}.ended").write_text('{"token": "t", "state": [1], "facts": 3}')
    assert (history.state(mine), history.facts(mine)) == (None, {})
    (history.folder / f"{mine.id}.ended").write_text(
        '{"token": "t", "state": {"state": "FAILED"}, "facts": {"ended": 1e300}}'
    )
    assert (history.state(mine), history.facts(mine)) == (None, {}), "no date can be made of it"


def test_a_chain_reports_problems_of_jobs_that_started(tmp_path, monkeypatch, capsys) -> None:
    """Oracle: what submit returns, replaced: no disk can be made to fail just after the start of a job."""
    record = JobRecord("gpt-1", "gpt", 0.0, "local", "local", str(tmp_path), str(tmp_path), 1, 1, 1)
    monkeypatch.setattr("gptctl.jobs.submit.submit", lambda *_: Submitted(record, problem="disk full"))
    monkeypatch.setattr("gptctl.engine.run_folder.read_plan", lambda _: None)
    monkeypatch.setattr(Chain, "_prepare_next", lambda _: None)
    chain = Chain.__new__(Chain)
    chain.length, chain.records, chain._session = 2, [], SimpleNamespace(store=None, backends=None)
    chain.first = SimpleNamespace(_replace=lambda plan: None)
    assert chain.submit()
    assert capsys.readouterr().err.count("gpt-1 was started, but there was a problem: disk full") == 2


@pytest.mark.parametrize(
    "facts", [{"local_dir": ""}, {"local_dir": "runs/x"}, {"local_dir": "/a\0b"}, {"token": "x/../y"}, {"token": 5}]
)
def test_a_record_that_leads_elsewhere_is_damaged(tmp_path, facts: dict[str, object]) -> None:
    """`rm` removes what these two fields name."""
    store = Store(tmp_path)
    store.add(record())
    file, facts = tmp_path / "jobs" / "gpt-1.json", {**facts}
    if "local_dir" in facts:
        facts["run_dir"] = facts.pop("local_dir")
    file.write_text(json.dumps({**json.loads(file.read_text()), **facts}))
    assert store.records() == []
    assert "is invalid" in store.damaged[0]


def test_a_damaged_record_is_not_an_unknown_job(tmp_path) -> None:
    """By the command that finds the damage and by later ones, with and without other jobs."""
    store = Store(tmp_path)
    store.add(record("gpt-3f9a2c"))
    (tmp_path / "jobs" / "gpt-3f9a2c.json").write_text("{")
    for number in range(3):
        with pytest.raises(UserError) as raised:
            store.find("gpt-3f9a2c" if number else "3f9a2c")
        (moved,) = (tmp_path / "damaged").iterdir()
        assert raised.value.message == f"the record of gpt-3f9a2c is damaged: it was moved to {moved}"
        assert "run folder" in raised.value.hint
        assert raised.value.exit_code == 2
        store.add(record("gpt-3f9a2d"))
    with pytest.raises(UserError, match=r"^unknown job: gpt-3f9a2e$"):
        store.find("gpt-3f9a2e")
    assert store.add(record("gpt-3f9a2c")._replace(token="u"))
    assert store.find("gpt-3f9a2c").token == "u"


def test_an_interrupted_cancel_says_which_jobs_were_asked(monkeypatch, capsys) -> None:
    """Ctrl-C comes while the second of three jobs is stopped, after the first one. Oracle: that order."""
    records = [record(f"gpt-{number}") for number in range(3)]

    def cancel(job: JobRecord, now: bool) -> None:
        if job.id == "gpt-1":
            raise KeyboardInterrupt

    monkeypatch.setattr("gptctl.jobs.state.may_run", lambda record, backends: True)
    monkeypatch.setattr("gptctl.remote.parallel.in_parallel", lambda work, items, most: [work(item) for item in items])
    session = SimpleNamespace(backends=None, backend_of=lambda record: SimpleNamespace(cancel=cancel))
    assert cancel_records(session, records, now=False, as_json=False) == 130
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if line and not line.startswith("stopping")] == [
        "gpt-1 was asked to stop. Check it: gptctl status gpt-1",
        "gpt-2 was not asked to stop yet. Stop it: gptctl cancel gpt-2",
    ]


def test_after_names_its_place(tmp_path) -> None:
    """Of several options that take a job, the message says which one is wrong."""
    store = Store(tmp_path)
    store.add(record())
    with pytest.raises(UserError, match=r"^--after gpt-2:any: unknown job: gpt-2$") as raised:
        unmet(["gpt-2:any"], SimpleNamespace(store=store))
    assert raised.value.hint == "did you mean gpt-1?"


def test_after_a_job_that_failed_the_conditions_that_it_meets_are_offered(tmp_path) -> None:
    store = Store(tmp_path)
    store.add(record("gpt-1"))
    for state, hint in (("FAILED", "gpt-1:any or gpt-1:fail,"), ("COMPLETED", "gpt-1:ok or gpt-1:any,")):
        session: Any = SimpleNamespace(store=store, state_of=lambda _, state=state: JobState(state))
        with pytest.raises(UserError, match=f"that job is {state}") as raised:
            unmet(["gpt-1:ok" if state == "FAILED" else "gpt-1:fail"], session)
        assert raised.value.hint.startswith(f"use --after {hint} run it again (gptctl rerun gpt-1)")


def test_each_variable_of_a_job_is_shown_once(tmp_path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"resolved": {"Launch": {"nodes": 1, "env": {"A": "1"}}}, "origins": {"Launch.env": "x.yaml:2"}})
    )
    (tmp_path / "plan.json").write_text(json.dumps({"env": {"A": "1", "B": "2"}, "env_origins": {"A": "x", "B": "y"}}))
    shown = job_status.origins(record(local_dir=str(tmp_path)), "")
    assert shown == [("Launch.nodes", 1, ""), ("Launch.env.A", "1", "x"), ("Launch.env.B", "2", "y")]


@pytest.mark.parametrize(
    ("override", "key", "said", "hint"),
    [
        ("Launch.rdzv.endpoint=10.xx.2.46:29400", "Launch.rdzv.endpoint", "cannot resolve host name 10.xx.2.46", "this machine's name"),
        ("Launch.rdzv.endpoint=192.0.2.7:29400", "Launch.rdzv.endpoint", "192.0.2.7 is not an address of this machine", "address of this machine"),
        ("Launch.rdzv.port={busy}", "Launch.rdzv.port", "the rendezvous endpoint 127.0.0.1:{busy} cannot be used", "a free port"),
    ],
)  # fmt: skip
def test_an_endpoint_that_cannot_be_used_is_named_by_its_key(tmp_path, override, key, said, hint) -> None:
    """Oracles: a name with letters in place of digits, an address for documentation, a port in use."""
    with socket.socket() as socket_in_use:
        socket_in_use.bind(("127.0.0.1", 0))
        socket_in_use.listen()
        busy = str(socket_in_use.getsockname()[1])
        name, _, value = override.replace("{busy}", busy).partition("=")
        overrides = [
            Override(name, value, "-o"),
            Override("Launch.entrypoint", "x.py", "--"),
            Override("Launch.nodes", "2", "-o"),
        ]
        checked = check_config(None, overrides)
        backend = Backends(print).of("local")
        (found,) = backend.preflight(checked, backend.plan(checked, Site("/", "python", "/t")))
    assert (found.code, found.key) == ("S004", key)
    assert found.message.startswith(said.replace("{busy}", busy))
    assert hint in found.hint


def test_two_rm_at_once_remove_a_folder_together(tmp_path, monkeypatch) -> None:
    """The other one removes a file between the listing and the removal of this one."""
    (tmp_path / "run" / "logs").mkdir(parents=True)
    real, calls = os.rmdir, []

    def rmdir(path, **options) -> None:
        real(path, **options)
        calls.append(path)
        if len(calls) == 1:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)

    monkeypatch.setattr(os, "rmdir", rmdir)
    remove_tree(tmp_path / "run")
    assert os.listdir(tmp_path) == []
