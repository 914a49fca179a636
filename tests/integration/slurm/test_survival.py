"""Jobs that lose their nodes, their ranks or their time, and go on. Oracle: the same training, undisturbed, without Slurm."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.integration.slurm.login import TINY, Login, await_true, losses, ran
from tests.lab import Lab
from tests.ranks import run as run_ranks
from tests.reported import Elements
from tests.tracked import event_curves

STEPS, SAVES = 200, 20
KEYS = [f"Engine.max_steps={STEPS}", f"Engine.save_load.save_steps={SAVES}", "Engine.save_load.keep_last=2"]
KEYS += ["Distributed.dp_degree=2", "Launch.max_restarts=1"]
KEYS += ["Engine.trackers=[tensorboard]"]
KEYS += ["Launch.env.OMP_NUM_THREADS=1"]  # bit for bit, sums are the same only over as many threads


@pytest.fixture
def login(lab: Lab) -> Login:
    return Login(lab)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    keys = [key for key in KEYS if not key.startswith("Launch.")]
    ended = run_ranks(folder, *TINY, *keys, world=2)
    assert ended.ok, ended.text
    return losses({"run_dir": str(folder)})


class Training:
    """A job of two ranks, followed from its beginning."""

    def __init__(self, login: Login, nodes: int = 2) -> None:
        self.login = login
        self.job = login.train("--nodes", str(nodes), "--gpus-per-node", str(2 // nodes), keys=KEYS)
        self.shown = login.folder / "shown"
        with self.shown.open("w") as out, (login.folder / "said").open("w") as err:
            self.follower = login.start("logs", self.job["job"], "--follow", stdout=out, stderr=err)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        file = Path(self.job["run_dir"]) / "output" / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        records = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return [record for record in records if "step" in record]

    def attempts(self) -> int:
        return len(list(Path(self.job["run_dir"]).glob("attempt-*")))

    def await_steps(self, attempt: int, more: int = 25) -> None:
        """Until that attempt has trained some steps."""
        log = Path(self.job["log_dir"]) / f"attempt-{attempt}" / "workerlog.0"

        def trained() -> bool:
            return log.exists() and log.read_text().count("global step") >= more

        await_true(trained, 90, lambda: self.login.batch_log(self.job))

    def end(self, state: str = "COMPLETED", seconds: float = 150) -> dict[str, Any]:
        facts = self.login.wait(self.job["job"], state, seconds=seconds)
        assert self.follower.wait(20) == (0 if state == "COMPLETED" else 1)
        return facts

    def assert_as(self, undisturbed: dict[int, float]) -> None:
        """The same losses bit for bit, and every line that any rank ever wrote was shown once."""
        assert losses(self.job) == undisturbed
        written: Counter[str] = Counter()
        for file in Path(self.job["log_dir"]).glob("attempt-*/*"):
            written.update(line.rstrip() for line in file.read_text().splitlines() if line.strip())
        shown = Counter(line.partition("] ")[2].rstrip() for line in self.shown.read_text().splitlines())
        missing = written - Counter({line.strip(): count for line, count in shown.items()}) - shown
        assert not missing, list(missing.items())[:5]

    def assert_ledger(self) -> list[dict[str, Any]]:
        """Every second is in one account, and a step counts as repeated if an attempt before it had logged it, too."""
        (row,) = self.login.json("cost", self.job["job"])["rows"]
        lengths = [each["gpus"] * (each["ended"] - each["began"]) for each in row["attempts"]]
        assert sum(row["accounts"].values()) == pytest.approx(row["allocation"], abs=0.01)
        assert sum(lengths) == pytest.approx(row["allocation"], abs=0.01)
        reached, again = 0, []
        for attempt in row["attempts"]:
            steps = steps_of_attempt(self, attempt["attempt"])
            again.append(len([step for step in steps if step <= reached]))
            reached = max([reached, *steps])
        assert [attempt["repeated_steps"] for attempt in row["attempts"]] == again
        assert (row["accounts"]["repeated"] > 0) == any(again)
        assert row["accounts"]["compute"] > 0
        assert row["accounts"]["unknown"] == 0
        return row["attempts"]

    def assert_report(self, spans: list[dict[str, Any]]) -> None:
        """The same attempts as in the ledger, as wide as they were long, and repeated steps where there are some."""
        facts = self.login.json("report", self.job["job"], "--output", f"{self.job['run_dir']}/report.html")
        found = Elements(Path(facts["file"]).read_text())
        boxes = [float(str(each["width"])) for each in found.of("rect", "attempt")]
        lengths = [each["ended"] - each["began"] for each in spans]
        assert [box / sum(boxes) for box in boxes] == pytest.approx([each / sum(lengths) for each in lengths], abs=0.01)
        assert bool(found.of("path", "account-repeated")) == any(each["repeated_steps"] for each in spans)
        assert [each["data-metric"] for each in found.of("path", "line")].count("loss") == 1

    def said(self) -> str:
        return (self.login.folder / "said").read_text()


def steps_of_attempt(training: Training, attempt: int) -> list[int]:
    log = (Path(training.job["log_dir"]) / f"attempt-{attempt}" / "workerlog.0").read_text()
    return [int(step) for step in re.findall(r"global step (\d+),", log)]


def preempt(login: Login) -> None:
    """A job of a higher partition takes all nodes for a moment."""
    login.slurm("sbatch", "--partition=high", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=true")


@pytest.fixture(scope="module")
def crashed(possible: None) -> Iterator[Future[Training]]:
    """In a lab of its own, beside other tests: a rank is killed, then a node crashes."""

    def scenario(lab: Lab) -> Training:
        training = Training(Login(lab))
        training.await_steps(0)
        lab.run("node2", "pkill", "-9", "-f", "-n", "trainer -c", check=True)
        training.await_steps(1)
        assert "requeued" not in training.said()
        lab.crash("node2")
        training.end(seconds=200)
        return training

    with Lab(nodes=3) as lab, ThreadPoolExecutor() as pool:
        yield pool.submit(scenario, lab)


def test_preempted_twice(login: Login, undisturbed: dict[int, float], crashed: Future[Training]) -> None:
    """Each time it saves, goes back into the queue, and repeats no step."""
    training = Training(login, nodes=1)
    for attempt in range(2):
        training.await_steps(attempt)
        preempt(login)
        await_true(lambda: training.attempts() == attempt + 2, 60, lambda: login.batch_log(training.job))  # noqa: B023
    facts = training.end()
    assert facts["attempts"] == 3
    training.assert_as(undisturbed)
    steps = [step for attempt in range(3) for step in steps_of_attempt(training, attempt)]
    assert steps == list(range(1, STEPS + 1))
    curve = event_curves(Path(training.job["run_dir"]) / "output" / "tensorboard")["loss"]
    assert [step for step, _ in curve] == steps
    assert login.batch_log(training.job).count("requeueing: the scheduler asked the job to stop") == 2
    assert "requeued" in training.said()  # an attempt may be shorter than the time between two queries
    spans = training.assert_ledger()
    training.assert_report(spans)
    assert [each["repeated_steps"] for each in spans] == [0, 0, 0]
    # It had no nodes in between: the higher job had them.
    assert all(before["ended"] < after["began"] for before, after in pairwise(spans))


@pytest.mark.long
def test_the_ledger_agrees_with_slurm(lab_with_accounting: Lab) -> None:
    """Oracle: the start and the end of each allocation in Slurm's accounting, which has whole seconds."""
    login = Login(lab_with_accounting)
    training = Training(login)
    training.await_steps(0)
    login.slurm("scontrol", "requeue", training.job["scheduler_id"])
    training.end()
    spans = training.assert_ledger()
    login.lab.run("head", "sleep", "2")  # slurmdbd gets the end a little later
    options = ("-D", "-X", "-P", "-n", "-j", training.job["scheduler_id"], "-o", "Start,End,AllocNodes")
    rows = [line.split("|") for line in login.slurm("sacct", *options).splitlines()]
    known = [(_seconds(start), _seconds(end)) for start, end, _ in rows]
    assert len(known) == len(spans) == 2
    for (start, end), span in zip(known, spans):
        assert -1.5 < span["began"] - start < 4, "the batch script has started the engine"
        # To Slurm, the first one ended with the requeue; its ranks saved after that.
        assert -6 < span["ended"] - end < 6


def _seconds(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()


@pytest.mark.long
def test_the_head_node_crashes(login: Login, undisturbed: dict[int, float]) -> None:
    """The batch script is gone with it."""
    training = Training(login)
    training.await_steps(0)
    login.lab.crash("node1")
    facts = training.end()
    assert facts["attempts"] == 2
    assert "node1" not in facts["hosts"]
    assert "node1 of the last attempt is down" in training.shown.read_text()
    training.assert_as(undisturbed)


@pytest.mark.long
def test_a_node_is_cut_off_and_comes_back(login: Login, undisturbed: dict[int, float]) -> None:
    training = Training(login)
    training.await_steps(0)
    login.lab.cut("node2")
    await_true(lambda: training.attempts() == 2, 90, lambda: login.batch_log(training.job))
    login.lab.restore("node2")
    facts = training.end()
    assert facts["attempts"] == 2
    training.assert_as(undisturbed)
    # On a busy machine its processes need a moment to end.
    await_true(lambda: not login.lab.run("node2", "pgrep", "-f", "trainer -c", check=False).stdout, 20)


@pytest.mark.long
def test_a_node_crashes_and_is_back_at_once(login: Login, undisturbed: dict[int, float]) -> None:
    training = Training(login)
    training.await_steps(0)
    login.lab.crash("node2")
    login.lab.restart("node2")
    training.end()
    training.assert_as(undisturbed)


@pytest.mark.long
def test_requeued_by_hand(login: Login, undisturbed: dict[int, float]) -> None:
    """`scontrol requeue`: the job has Slurm's KillWait to save."""
    training = Training(login)
    training.await_steps(0)
    login.slurm("scontrol", "requeue", training.job["scheduler_id"])
    facts = training.end()
    assert facts["attempts"] == 2
    training.assert_as(undisturbed)


@pytest.mark.long
def test_requeued_by_hand_after_its_end(login: Login) -> None:
    job = login.submit_quick("--requeue", JOB_SECONDS="8")
    login.wait(job["job"], "COMPLETED")
    login.slurm("scontrol", "requeue", job["scheduler_id"])
    await_true(lambda: len(ran(job)) == 2, 60, lambda: login.batch_log(job))
    assert login.state(job["job"]) == "RUNNING"


@pytest.mark.long
def test_requeued_again_and_again(login: Login) -> None:
    """By whomever: without a new checkpoint three attempts are enough."""
    done = login.run(*login.quick_trainer(JOB_SECONDS="60"))
    job = json.loads(done.stdout)
    for attempt in range(3):
        await_true(lambda: len(ran(job)) == attempt + 1, 90, lambda: login.batch_log(job))  # noqa: B023
        login.slurm("scontrol", "requeue", job["scheduler_id"])
    facts = login.wait(job["job"], "FAILED")
    assert facts["reason"].endswith("three attempts without a new checkpoint")
    assert len(ran(job)) == 3


@pytest.mark.long
def test_the_answer_to_a_requeue_is_lost() -> None:
    """Slurm has heard it all the same, and gives the script its usual half minute to end."""
    with Lab(nodes=1, kill_wait=30) as lab:
        login = Login(lab)
        spoilt = 'case "$(hostname) $1" in node*requeue) "$LAB_REAL" "$@"; echo "Zero Bytes" >&2; exit 1 ;; esac'
        lab.break_client("scontrol", f'{spoilt}; exec "$LAB_REAL" "$@"')
        job = login.submit_quick("--requeue", JOB_SECONDS="60")
        await_true(lambda: bool(ran(job)), 20)
        login.slurm("scancel", "--signal=USR1", "--batch", job["scheduler_id"])
        await_true(lambda: len(ran(job)) == 2, 90, lambda: login.batch_log(job))
        assert login.state(job["job"]) == "RUNNING"


@pytest.mark.long
def test_the_time_limit(login: Login) -> None:
    """Some seconds before it the job saves and goes on in another allocation. Slurm looks about every 30 s."""
    keys = [*KEYS, "Engine.max_steps=100000", "Engine.save_load.save_steps=0", "Launch.slurm.save_before=60"]
    # A minute to begin with the training, which a busy machine needs.
    job = login.train("--nodes", "1", "--gpus-per-node", "2", "--time", "2", keys=keys)
    await_true(lambda: (Path(job["run_dir"]) / "attempt-1").exists(), 240, lambda: login.batch_log(job))
    assert "the scheduler asked the job to stop" in login.batch_log(job)
    assert any((Path(job["run_dir"]) / "output").glob("step_*"))
    login.run("cancel", job["job"], "--now")


@pytest.mark.long
def test_a_job_is_resumed_after_its_time_limit(login: Login) -> None:
    """It saves something, but does not stop when it is asked to: Slurm ends it. Oracle: the config of the next job."""
    may_end = login.folder / "may-end"
    login.stand_in.write_text(
        f"""#!/bin/bash
        mkdir -p "$GPTCTL_RUN_DIR/output/step_40"
        echo {{}} > "$GPTCTL_RUN_DIR/output/step_40/manifest.json"
        trap '' TERM USR1
        [ -e {may_end} ] || sleep 600
        """
    )
    done = login.run(*login.quick_trainer("--time", "1", "--no-requeue", "-o", "Engine.max_steps=50"))
    assert done.returncode == 0, done.stderr
    job = json.loads(done.stdout)
    ended = login.wait(job["job"], "TIMEOUT", "FAILED", "STOPPED", "COMPLETED", seconds=240)
    assert ended["state"] == "TIMEOUT", ended
    may_end.touch()
    done = login.run("resume", job["job"], "--time", "10", "--json")
    assert done.returncode == 0, done.stderr
    assert f"continues {job['job']} from step 40, with the same config" in done.stderr
    rest = json.loads(done.stdout)
    login.wait(rest["job"], "COMPLETED")
    resolved = json.loads((Path(rest["run_dir"]) / "config.json").read_text())["resolved"]
    assert resolved["Engine"]["save_load"]["ckpt_dir"] == f"{job['run_dir']}/output"
    shown = login.json("show", rest["job"])
    assert (shown["continues"], shown["lineage"]) == (job["job"], [job["job"], rest["job"]])


@pytest.mark.long
def test_preempted_where_only_ranks_are_told(undisturbed: dict[int, float]) -> None:
    """Without the site's preempt_send_user_signal: SIGTERM to the ranks, SIGKILL after the grace time."""
    with Lab(nodes=4, user_signal=False) as lab:
        login = Login(lab)
        training = Training(login)
        training.await_steps(0)
        preempt(login)
        facts = training.end()
        assert facts["attempts"] == 2
        training.assert_as(undisturbed)


def test_how_often_a_job_is_started_again(login: Login) -> None:
    """Two failures are as many as it may have; one that says that nothing helps is enough; a node that is killed without
    a word is the one to blame, not those that are ended for it."""
    asked: list[dict[str, str]] = [{"JOB_EXIT": "7"}, {"JOB_EXIT": "93", "JOB_HOPELESS": "1"}]
    jobs = [login.submit_quick("--comment", "x JobState=CANCELLED", "--max-restarts", "1", **env) for env in asked]
    jobs.append(login.submit_quick("--nodes", "2", JOB_SECONDS="1", JOB_KILLED="1"))
    facts = [login.wait(job["job"], "FAILED") for job in jobs]
    assert [job["attempts"] for job in facts] == [2, 1, 1]
    assert facts[1]["reason"].endswith("exit code 93; a restart would fail in the same way")
    assert re.match(r"node 1 \(node\d\): no exit code recorded", facts[2]["reason"])


def test_without_progress_three_attempts_are_enough(login: Login) -> None:
    """The stand-in fails at once and saves nothing: twice here, once elsewhere."""
    done = login.run(*login.quick_trainer("--max-restarts", "9", JOB_EXIT="7"))
    assert done.returncode == 0, done.stderr
    job = json.loads(done.stdout)
    facts = login.wait(job["job"], "FAILED")
    assert re.fullmatch(
        r"(rank|node) 0 \(node.*\): exit code 7.*; three attempts without a new checkpoint", facts["reason"]
    )
    assert facts["attempts"] == 3
    assert "requeueing: two attempts on these nodes failed" in login.batch_log(job)


@pytest.fixture
def long_job(login: Login) -> tuple[Login, dict[str, Any]]:
    return login, login.submit_quick("--nodes", "2", JOB_SECONDS="60")


def test_cancelled_while_it_runs(long_job: tuple[Login, dict[str, Any]]) -> None:
    login, job = long_job
    await_true(lambda: len(ran(job)) == 2, 30, lambda: login.batch_log(job))
    begin = time.monotonic()
    done = login.run("cancel", job["job"])
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - begin < 20
    assert login.state(job["job"]) == "CANCELLED"
    assert len((Path(job["run_dir"]) / "asked").read_text().split()) == 2  # each node had time to save
    assert not login.slurm("squeue", "-h")


def test_cancelled_with_scancel(long_job: tuple[Login, dict[str, Any]]) -> None:
    login, job = long_job
    login.wait(job["job"], "RUNNING")
    login.slurm("scancel", job["scheduler_id"])
    assert login.wait(job["job"], "CANCELLED")["reason"] == "with scancel"


def test_cancel_races_with_start(login: Login) -> None:
    """At any moment around its start: cancelled is final, and nothing runs afterwards."""
    jobs = []
    for pause in (0.0, 0.7):
        job = login.submit_quick(JOB_SECONDS="60")
        time.sleep(pause)
        done = login.run("cancel", "--now", job["job"])
        assert done.returncode == 0, done.stderr
        jobs.append(job)
    assert {login.state(job["job"]) for job in jobs} == {"CANCELLED"}
    assert not login.slurm("squeue", "-h")


def test_cancel_races_with_requeue(login: Login) -> None:
    job = login.submit_quick("--requeue", JOB_SECONDS="60")
    login.wait(job["job"], "RUNNING")
    login.slurm("scontrol", "requeue", job["scheduler_id"])
    done = login.run("cancel", "--now", job["job"])
    assert done.returncode == 0, done.stderr
    assert login.state(job["job"]) == "CANCELLED"
    assert not login.slurm("squeue", "-h")


def test_a_rank_is_killed_and_a_node_crashes(undisturbed: dict[int, float], crashed: Future[Training]) -> None:
    """First it is started again on the same nodes, from its last save; then, after Slurm's own detection time, elsewhere.
    The user sees which node failed."""
    training = crashed.result()
    hosts = [(Path(training.job["run_dir"]) / f"attempt-{number}/hosts").read_text().split() for number in range(3)]
    assert hosts[0] == hosts[1] == ["node1", "node2"]
    assert hosts[2] == ["node1", "node3"]
    assert "Node failure on node2" in training.said()
    assert "node2 of the last attempt is down" in training.shown.read_text()
    training.assert_as(undisturbed)
    for before, after in ((0, 1), (1, 2)):
        last, first = steps_of_attempt(training, before)[-1], steps_of_attempt(training, after)[0]
        assert first % SAVES == 1
        assert last - 2 * SAVES < first <= last + 1
    spans = training.assert_ledger()
    training.assert_report(spans)
    assert spans[0]["ended"] == spans[1]["began"], "in one allocation"
    assert re.search(r"rank 1 .*SIGKILL", spans[0]["cause"])
