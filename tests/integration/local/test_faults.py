"""What goes wrong around a submit: bad input, a killed gptctl, many at once, full disks. Nothing may stay half-made."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.integration.slurm.login import TINY

# Ends gptctl by a signal just before its K-th change of the world. An audit hook sees every one of them.
KILLER = """
import os, signal, sys
limit, number = int(sys.argv.pop(1)), int(sys.argv.pop(1))
count = 0
def hook(event, arguments):
    global count
    changes = event in ("os.mkdir", "os.link", "os.rename", "os.remove", "os.chmod", "os.symlink", "subprocess.Popen", "os.rmdir")
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
    if changes or writes:
        count += 1
        if count == limit:
            os.kill(os.getpid(), number)
sys.addaudithook(hook)
from gptctl.cli import main
leave = os._exit
def told(code):
    print("changes", count, file=sys.stderr, flush=True)
    leave(code)
os._exit = told
main()
"""
QUICK = ["submit", "--cluster", "./quick.yaml", "--", "x.py"]


def killed_at(jobs, limit: int, number: int) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "HOME": str(jobs.folder / "home")}
    command = [sys.executable, "-c", KILLER, str(limit), str(int(number)), *QUICK]
    return subprocess.run(command, cwd=jobs.folder, env=env, capture_output=True, text=True, timeout=60)


def settled(jobs) -> list[dict]:
    """What the next gptctl says, once running jobs have ended."""
    deadline = time.monotonic() + 20
    while True:
        rows = json.loads(jobs.gptctl("list", "--json").stdout)
        if all(row["state"] not in ("PENDING", "RUNNING") for row in rows):
            return rows
        assert time.monotonic() < deadline, rows
        time.sleep(0.1)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_gptctl_ended_at_any_point_of_submit_leaves_a_whole_job_or_nothing(jobs, number: int) -> None:
    """Exhaustive over the changes that a submit makes. The oracle is the next gptctl, and the folders."""
    changes = int(killed_at(jobs, 0, number).stderr.split("changes ")[1])
    assert 15 < changes < 80
    known = {row["job"] for row in settled(jobs)}
    assert len(known) == 1
    seen = set()
    for limit in range(1, changes + 1):
        ended = killed_at(jobs, limit, number)
        rows = {row["job"]: row for row in settled(jobs)}
        new = rows.keys() - known
        assert len(new) <= 1
        assert all(rows[job]["state"] == "COMPLETED" for job in new), (limit, rows)
        seen.add(len(new))
        known |= new
        runs = {entry.name for entry in (jobs.folder / "runs").iterdir()} - {"latest"}
        assert runs - {name for name in runs if name.startswith(".latest")} == known, limit
        store = jobs.folder / "home" / ".local" / "state" / "gptctl" / "jobs"
        assert {file.name for file in store.glob("[!.]*.json")} == {f"{job}.json" for job in known}
        if number == signal.SIGINT:
            assert ended.returncode == 130 or new
            assert "Traceback" not in ended.stderr
            assert not new or ended.returncode == 0 or "is still running. Follow it: gptctl logs" in ended.stderr
    assert seen == {0, 1}


def test_many_gptctl_at_once(jobs) -> None:
    """Sixteen submits of the same job: sixteen ids, each job complete, no record lost."""
    ids: list[str] = []
    threads = [threading.Thread(target=lambda: ids.append(jobs.quick())) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(ids)) == 16
    rows = settled(jobs)
    assert {row["job"] for row in rows} == set(ids)
    assert {row["state"] for row in rows} == {"COMPLETED"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--nodes", "2", "--gpus-per-node", "3", "-o", "Distributed.mp_degree=4"], ["L001"]),
        (["--", "no/such/script.py"], ["S001", "no/such/script.py", "does not exist"]),
        (["--", "."], ["S001", "is a folder"]),
        (["-o", "Launch.files=[nothing.py]", "--", "x.py"], ["S001", "nothing.py"]),
        (["-o", "Data.Train.dataset.name=GPTDataset"], ["S002", "./data does not exist"]),
        (["-o", "Engine.save_load.ckpt_dir=no/such"], ["S002", "no/such"]),
        (["-o", "Engine.save_load.ckpt_dir=hf"], ["S002", "hf contains weights of another program (model.safetensors)", "gptctl import ", "/hf-checkpoint"]),
        (["--name", "a b"], ["C014", "--name a b"]),
        (["--name", "x\ntouch hit"], ["C014"]),
        (["--name", "$(touch hit)"], ["C014"]),
        (["--name", "%j"], ["C014"]),
        (["--name", "-x"], ["C014"]),
        (["--name", "n" * 65], ["C014"]),
        (["--name", "名"], ["C014"]),
        (["--env", "A B=1", "--", "x.py"], ["--env A B=1: invalid variable"]),
        (["--env", "A", "--", "x.py"], ["invalid variable"]),
        (["--env", "A=\x1b[31m", "--", "x.py"], ["C006", "--env A"]),
        (["--time", "never", "--", "x.py"], ["C011", "--time never"]),
        (["--cluster", "a900", "--", "x.py"], ["A001", "unknown cluster: a900", "known: local, slurm-example, ssh-example"]),
        (["--cluster", "", "--", "x.py"], ["--cluster is empty"]),
        (["--devices", "0,0", "--", "x.py"], ["C012"]),
        (["--env", "GPTCTL_RUN_DIR=/x", "--", "x.py"], ["E002", "GPTCTL_RUN_DIR"]),
        (["--env", "RANDOM=5", "--", "x.py"], ["E001"]),
        (["--env", "RANK=5", "--", "x.py"], ["E002"]),
        (["-o", "Launch.files=[a/x.py]", "--", "x.py"], ["S001", "has the same name as"]),
        (["-o", "Launch.files=[fifo]", "--", "x.py"], ["S001", "/fifo is a named pipe, not a file"]),
        (["-o", "Launch.files=[/dev/zero]", "--", "x.py"], ["S001", "/dev/zero is a device, not a file"]),
        (["-o", "Launch.files=[/dev/zero]"], ["S001", "/dev/zero is a device, not a file"]),
        (["-o", "Launch.rdzv.endpoint=no-such-host.invalid:29500", "--", "x.py"],
         ["S004 Launch.rdzv.endpoint (-o Launch.rdzv.endpoint=no-such-host.invalid:29500): cannot resolve host name no-such-host.invalid"]),
        (["--dry-run", "--follow", "--", "x.py"], ["--dry-run cannot be combined"]),
        (["--template", "x.py", "--", "x.py"], ["x.py does not replace any template"]),
        (["--template", "a", "--", "x.py"], ["a contains no templates"]),
        (["--time", "3:70", "--", "x.py"], ["invalid time: 3:70"]),
        (["--time", "1-25:00:00", "--", "x.py"], ["invalid time: 1-25:00:00"]),
        (["--style", "sbatch", "--", "x.py"], ["A006"]),
        (["--max-restarts", "-1", "--", "x.py"], ["C012"]),
        (["--template", "no.j2", "--", "x.py"], ["unknown template: no.j2"]),
        (["--resume", "gpt-1", "--", "x.py"], ["there are no jobs yet"]),
        (["--cluster", "./far.yaml", "--", "x.py"], ["S010 no-such-host.invalid: ", "nothing was started"]),
        (["--"], ["there is no script after --"]),
        (["config.yaml", "-c", "config.yaml"], ["config given twice"]),
        (["--nodes", "x", "--name", "a b", "--time", "never"], ["--nodes x", "--name a b", "--time never"]),
    ],
)  # fmt: skip
def test_a_mistake_is_named_and_leaves_nothing(jobs, arguments: list[str], expected: list[str]) -> None:
    """All at once, before anything is written."""
    jobs.gptctl("init")
    (jobs.folder / "a").mkdir()
    (jobs.folder / "a" / "x.py").write_text("")
    os.mkfifo(jobs.folder / "fifo")
    (jobs.folder / "hf").mkdir()
    (jobs.folder / "hf" / "model.safetensors").touch()
    (jobs.folder / "far.yaml").write_text(
        "kind: ssh\ngpus_per_node: 1\nhosts: [no-such-host.invalid]\nrun_root: /srv\n"
    )
    answer = jobs.gptctl("submit", *arguments)
    assert answer.returncode in (1, 2, 3), answer.stdout
    assert all(text in answer.stderr for text in expected), answer.stderr
    assert "Traceback" not in answer.stderr
    assert jobs.left_over() == []
    assert not (jobs.folder / "hit").exists()


def test_a_machine_without_slurm_is_named_and_leaves_nothing(jobs) -> None:
    """Neither a half-made job, nor a word about it ever after."""
    (jobs.folder / "far.yaml").write_text(f"kind: slurm\ngpus_per_node: 1\nrun_root: {jobs.folder}/runs\n")
    alone = {"PATH": str(Path(sys.executable).parent)}
    answer = jobs.gptctl("submit", "--cluster", "./far.yaml", "--", "x.py", **alone)
    assert answer.returncode == 3
    assert "Slurm is not installed here" in answer.stderr
    assert jobs.left_over() == []
    assert jobs.gptctl("list", **alone).stderr == ""


def test_an_interpreter_that_cannot_train_is_refused(jobs) -> None:
    """One that does not exist, and one without torch: a virtual environment with nothing but gptctl's own packages."""
    (jobs.folder / "quick.yaml").write_text("kind: local\npython: /no/such/python\n")
    answer = jobs.gptctl(*QUICK)
    assert "S003" in answer.stderr
    assert "the interpreter /no/such/python does not exist" in answer.stderr
    (jobs.folder / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\nu.find_spec = lambda name, *a: None if name == 'torch' else find(name, *a)"
    )
    answer = jobs.gptctl("submit", "--", "x.py", PYTHONPATH=str(jobs.folder))
    assert "has no torch" in answer.stderr
    assert jobs.left_over() == []


def test_an_output_folder_with_checkpoints_is_refused_before_the_job_runs(jobs) -> None:
    jobs.gptctl("init")
    (jobs.folder / "out" / "step_10").mkdir(parents=True)
    asked = ["submit", "-o", "Engine.save_load.output_dir=out", "--dry-run"]
    assert "S005" in jobs.gptctl(*asked).stderr
    assert jobs.gptctl(*asked, "-o", "Engine.save_load.ckpt_dir=auto").returncode == 0


def test_a_busy_port_is_refused_and_a_free_one_respected(jobs) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        answer = jobs.gptctl("submit", "-o", f"Launch.rdzv.port={port}", "--", "x.py")
        assert "S004" in answer.stderr
        assert f"the rendezvous endpoint 127.0.0.1:{port} cannot be used: Address already in use" in answer.stderr
    assert jobs.left_over() == []
    with socket.socket() as usual:
        usual.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        usual.bind(("127.0.0.1", 29500))  # torchrun's own default is nobody's business here
        usual.listen()
        assert jobs.gptctl("submit", "--dry-run", "--", "x.py").returncode == 0
    job = jobs.quick("-o", f"Launch.rdzv.port={port}")
    assert jobs.status(job)["endpoint"] == f"127.0.0.1:{port}"


def test_a_job_whose_gptctl_is_killed_while_it_starts_runs_all_the_same(jobs) -> None:
    """Killed when the supervisor has been started, and before it could answer."""
    env = {**os.environ, "HOME": str(jobs.folder / "home")}
    command = [
        sys.executable,
        "-c",
        "import gptctl.backends.local as l, os, signal, subprocess\nstart = subprocess.Popen\nclass popen(start):\n    def __init__(self, a, **k):\n        super().__init__(a, **k)\n        if 'supervisor' in a: os.kill(os.getpid(), signal.SIGKILL)\nl.subprocess.Popen = popen\nfrom gptctl.cli import main\nmain()",
        *QUICK,
    ]
    assert subprocess.run(command, cwd=jobs.folder, env=env, capture_output=True).returncode == -signal.SIGKILL
    time.sleep(2)
    (row,) = settled(jobs)
    assert row["state"] == "COMPLETED"


@pytest.mark.parametrize(("port", "tries"), [("", 3), ("29777", 1)])
def test_only_a_port_of_ours_is_chosen_again(jobs, port: str, tries: int) -> None:
    (jobs.folder / "quick").write_text("#!/bin/sh\necho x >> $GPTCTL_RUN_DIR/tries\necho 'EADDRINUSE'; exit 1\n")
    job = jobs.quick("-o", f"Launch.rdzv.port={port}")
    assert jobs.wait(job) == "FAILED"
    assert len((jobs.run_dir(job) / "tries").read_text().split()) == tries


def test_a_port_that_is_taken_in_between_is_chosen_again(jobs) -> None:
    """A torchrun that finds its port taken, twice: it is not the job's fault, and costs it no restart."""
    (jobs.folder / "quick").write_text(
        "#!/bin/sh\ncd $GPTCTL_RUN_DIR\necho $MASTER_PORT >> ports\n[ $(wc -l < ports) -gt 2 ] || { echo 'EADDRINUSE: address already in use'; exit 1; }\n"
    )
    job = jobs.quick()
    assert jobs.wait(job) == "COMPLETED"
    assert len(set((jobs.run_dir(job) / "ports").read_text().split())) == 3
    assert jobs.status(job)["attempts"] == 1


@pytest.mark.parametrize("home", ["/proc/no/such/folder", "/dev/null"])
def test_a_home_that_cannot_be_written_to(jobs, home: str) -> None:
    answer = jobs.gptctl(*QUICK, GPTCTL_HOME=home)
    assert answer.returncode == 3
    assert "cannot write job records to" in answer.stderr
    assert "GPTCTL_HOME" in answer.stderr
    assert jobs.left_over() == []


def test_a_run_root_that_cannot_be_written_to(jobs) -> None:
    (jobs.folder / "quick.yaml").write_text(f"kind: local\npython: {jobs.folder}/quick\nrun_root: /proc/runs\n")
    answer = jobs.gptctl(*QUICK)
    assert answer.returncode == 3
    assert "cannot write" in answer.stderr
    assert jobs.left_over() == []
    (jobs.folder / "quick.yaml").write_text("kind: local\nrun_root: /dev/null/runs\n")
    assert "S006" in jobs.gptctl("clusters", "check", "./quick.yaml").stdout


@pytest.mark.parametrize("size", ["8k", "40k", "60k"])
def test_a_full_disk(jobs, size: str) -> None:
    """Runs on a file system of a few kilobytes, in a mount namespace of the test's own."""
    if os.geteuid() or subprocess.run(["unshare", "--mount", "true"]).returncode:
        pytest.skip("needs root and mount namespaces")
    (jobs.folder / "runs").mkdir()
    gptctl = os.path.join(os.path.dirname(sys.executable), "gptctl")
    script = f"mount -t tmpfs -o size={size} none runs && {gptctl} init > /dev/null; {gptctl} submit; echo code $?; ls -A runs"
    env = {**os.environ, "HOME": str(jobs.folder / "home")}
    answer = subprocess.run(
        ["unshare", "--mount", "bash", "-c", script], cwd=jobs.folder, env=env, capture_output=True, text=True
    )
    assert answer.stdout.splitlines()[-1] == "code 3", answer.stdout + answer.stderr
    assert "No space left on device" in answer.stderr
    assert "Traceback" not in answer.stderr
    assert json.loads(jobs.gptctl("list", "--json").stdout) == []


DAMAGES = {
    "empty": b"",
    "torn": b'{"id": "gpt-x", "na',
    "list": b"[]",
    "text": b"\xff\xfe",
    "other": b'{"id": 1}',
    "types": b'{"id": "types", "name": "n", "created": "x", "cluster": "c", "kind": "local", "run_dir": "/", "log_dir": "/", "nodes": 1, "per_node": 1, "world": 1}',
}


def test_damaged_records_are_set_aside_and_named(jobs) -> None:
    good = jobs.quick()
    store = jobs.folder / "home" / ".local" / "state" / "gptctl" / "jobs"
    for name, text in DAMAGES.items():
        (store / f"{name}.json").write_bytes(text)
    os.mkfifo(store / "fifo.json")
    (store / "folder.json").mkdir()
    (store / "link.json").symlink_to("/etc/passwd")
    answer = jobs.gptctl("list", "--json")
    assert [row["job"] for row in json.loads(answer.stdout)] == [good]
    for name in [*DAMAGES, "fifo", "folder", "link"]:
        assert f"{name}.json is damaged" in answer.stderr
        assert list(store.parent.glob(f"damaged/{name}.json.*"))
    assert jobs.gptctl("list").stderr == ""  # not met again


def test_records_of_an_older_and_a_newer_gptctl(jobs) -> None:
    job = jobs.quick()
    file = jobs.folder / "home" / ".local" / "state" / "gptctl" / "jobs" / f"{job}.json"
    record = json.loads(file.read_text())
    for changed in (
        {**record, "schema": 9, "new": {"a": 1}},
        {k: v for k, v in record.items() if k not in ("config", "token", "schema")},
    ):
        file.write_text(json.dumps(changed))
        assert jobs.wait(job) == "COMPLETED"


def test_ids_by_prefix(jobs) -> None:
    first, second = jobs.quick(), jobs.quick("--name", "other")
    assert json.loads(jobs.gptctl("status", second[:7], "--json").stdout)["job"] == second
    jobs.quick("--name", "other")
    answer = jobs.gptctl("status", "other")
    assert answer.returncode == 2
    assert f"{second}-2" in answer.stderr
    assert json.loads(jobs.gptctl("status", second, "--json").stdout)["job"] == second  # an exact id is no prefix
    unknown = jobs.gptctl("status", first.replace("-", "_"))
    assert unknown.returncode == 2
    assert f"did you mean {first}?" in unknown.stderr
    latest = jobs.gptctl("status")  # without a name the latest, and it says which, once
    assert "job other" in latest.stdout
    assert "job other" not in latest.stderr


def test_without_progress_three_attempts_are_enough(jobs) -> None:
    """The stand-in is taken for the bundled trainer, fails at once and saves nothing; a script may fail as often as asked."""
    overrides = [word for key in TINY for word in ("-o", key)]
    (jobs.folder / "config.yaml").write_text("Global: {seed: 1}\n")
    trainer = jobs.submit("--cluster", "./quick.yaml", "--max-restarts", "9", *overrides, QUICK_CODE="7")
    script = jobs.quick("--max-restarts", "4", QUICK_CODE="7")
    assert jobs.wait(trainer) == jobs.wait(script) == "FAILED"
    assert jobs.status(trainer)["attempts"] == 3
    assert "exit code 7" in jobs.status(trainer)["reason"]
    assert jobs.status(trainer)["reason"].endswith("; three attempts without a new checkpoint")
    assert jobs.status(script)["attempts"] == 5
