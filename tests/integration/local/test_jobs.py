"""Jobs on the local cluster from submit to their end. Oracles: files, exit codes and processes of the machine."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gptctl.engine.processes import processes_of
from tests.unit.test_render import HOSTILE
from trainer.logline import parse_train_line

TOY = """
import json, os, sys, time
import beside
print("RANK", os.environ["RANK"], json.dumps(sys.argv[2:]), flush=True)
os.system("echo child of $RANK")
import torch, torch.distributed as dist
dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
print("world", int(one), flush=True)
for step in range(int(sys.argv[1])):
    dist.all_reduce(one)
    print("step", step, flush=True)
    time.sleep(0.1)
dist.destroy_process_group()
"""
SMALL = ["-o", "Model.num_layers=1", "-o", "Model.hidden_size=32", "-o", "Data.Train.dataset.max_seq_len=16"]
SMALL += ["-o", "Global.local_batch_size=2", "-o", "Global.micro_batch_size=2", "-o", "Engine.test_iters=1"]
SMALL += ["-o", "Engine.eval_freq=1000", "-o", "Engine.logging_freq=1"]


@pytest.fixture
def toy(tmp_path: Path) -> list[str]:
    """A script of the user's, with a module beside it that it imports."""
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "beside.py").write_text("import deeper")
    (tmp_path / "deeper.py").write_text("x = 1")
    return ["--", "toy.py"]


def losses(text: str) -> dict[int, float]:
    lines = filter(None, map(parse_train_line, text.splitlines()))
    return {line.step: line.loss for line in lines}


def is_gone(run_dir: Path, seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while processes_of(str(run_dir)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not processes_of(str(run_dir))


LAYERS4 = ["-o", "Model.num_layers=4", "-o", "Model.hidden_size=32", "-o", "Model.num_attention_heads=4"]
LAYERS4 += ["-o", "Data.Train.dataset.max_seq_len=16", "-o", "Global.local_batch_size=8", "-o", "Engine.max_steps=5"]
LAYERS4 += ["-o", "Engine.check_accuracy=True", "-o", "Engine.logging_freq=1"]


@pytest.mark.long
def test_a_pipeline_of_tensor_parallel_stages_on_two_nodes(jobs) -> None:
    """A stage on each of two torchrun agents. Oracle: the job of one rank; the first rank's log has the last's loss."""
    assert jobs.gptctl("init").returncode == 0
    micro = ["-o", "Global.micro_batch_size=4"]
    alone = jobs.submit("--gpus-per-node", "1", *LAYERS4, *micro)
    assert jobs.wait(alone, 90) == "COMPLETED"
    degrees = ["-o", "Distributed.pp_degree=2", "-o", "Distributed.mp_degree=2"]
    job = jobs.submit("--nodes", "2", "--gpus-per-node", "2", *LAYERS4, *micro, *degrees)
    assert jobs.wait(job, 90) == "COMPLETED"
    here, there = losses(jobs.log(job, 0)), losses(jobs.log(alone, 0))
    assert here.keys() == there.keys() == set(range(1, 6))
    assert max(abs(here[step] - there[step]) for step in there) <= 5e-6
    topology = jobs.log(job, 3)
    assert (
        "rank 3: mp 2 × sharding 1 × pp 2 × dp 1 on cpu, groups: mp [2, 3], sharding [3], pp [1, 3], dp [3]" in topology
    )
    assert "rank 3: layers 2 to 3; memory held: parameters" in topology
    assert "pipeline segments: 0, 2, 4" in jobs.log(job, 0)


def test_a_script_on_two_nodes(jobs, toy) -> None:
    """Every rank's file holds what that rank and its children printed, arguments arrive unchanged, nothing is left."""
    arguments = [word for word in HOSTILE if word]
    job = jobs.submit("--nodes", "2", "--gpus-per-node", "2", *toy, "2", *arguments)
    assert jobs.wait(job) == "COMPLETED"
    for rank in range(4):
        first, *rest = jobs.log(job, rank).splitlines()
        assert first == f"RANK {rank} {json.dumps(arguments)}"
        assert rest == [f"child of {rank}", "world 4", "step 0", "step 1"]
    status = jobs.status(job)
    assert [(row["rank"], row["node"], row["exit"]) for row in status["ranks"]] == [
        (0, 0, 0),
        (1, 0, 0),
        (2, 1, 0),
        (3, 1, 0),
    ]
    assert status["exit_codes"] == {"0": 0, "1": 0}
    assert is_gone(jobs.run_dir(job))
    code = jobs.run_dir(job) / "code"
    assert sorted(entry.name for entry in code.glob("*.py")) == ["beside.py", "deeper.py", "rank_log.py", "toy.py"]


def test_a_module_runs_from_its_copy_in_the_folder_of_the_user(jobs) -> None:
    """What the dry run prints is what runs. Oracle: the paths that the module itself prints."""
    (jobs.folder / "pack").mkdir()
    (jobs.folder / "pack/__init__.py").write_text("")
    (jobs.folder / "pack/train.py").write_text("import os, sys, beside\nprint(__file__, os.getcwd(), sys.argv[1:])")
    (jobs.folder / "beside.py").write_text("")
    words = ["--gpus-per-node", "1", "--", "-m", "pack.train", "--lr", "a b"]
    printed = jobs.gptctl("submit", "--dry-run", *words).stdout
    job = jobs.submit(*words)
    assert jobs.wait(job) == "COMPLETED"
    folder = jobs.run_dir(job)
    assert jobs.log(job, 0) == f"{folder}/code/pack/train.py {jobs.folder} ['--lr', 'a b']\n"
    assert printed == (folder / "launch.sh").read_text()
    assert (folder / "code/beside.py").exists()


def test_a_run_folder_is_private_complete_and_its_own(jobs) -> None:
    (jobs.folder / "helper").mkdir(mode=0o755)
    (jobs.folder / "helper" / "run.sh").write_text("")
    (jobs.folder / "helper" / "run.sh").chmod(0o755)
    first = jobs.quick("-o", "Launch.files=[helper]")
    second = jobs.quick("-o", "Launch.files=[helper]")
    assert second == f"{first}-2"
    assert (jobs.folder / "runs" / "latest").resolve() == jobs.run_dir(second)
    assert jobs.wait(second) == "COMPLETED"
    folder = jobs.run_dir(second)
    for entry in [folder, *folder.rglob("*")]:
        assert entry.stat().st_mode & 0o077 == 0, entry
    assert os.access(folder / "code" / "helper" / "run.sh", os.X_OK)
    assert {"config.json", "cluster.json", "plan.json", "launch.sh", "git.json", "code"} <= {
        e.name for e in folder.iterdir()
    }
    record = jobs.folder / "home" / ".local" / "state" / "gptctl" / "jobs" / f"{second}.json"
    assert record.stat().st_mode & 0o777 == 0o600


def test_a_dry_run_is_what_runs_and_changes_nothing(jobs) -> None:
    asked = ["--cluster", "./quick.yaml", "--nodes", "2", "--env", "A=it's", "--", "x.py", "a b"]
    dry = jobs.gptctl("submit", "--dry-run", *asked)
    assert dry.returncode == 0, dry.stderr
    assert jobs.left_over() == []
    assert jobs.gptctl("submit", "--dry-run", *asked).stdout == dry.stdout
    job = jobs.submit(*asked)
    assert (jobs.run_dir(job) / "launch.sh").read_text() == dry.stdout


def test_killing_one_rank_ends_all_within_seconds(jobs, toy) -> None:
    job = jobs.submit("--nodes", "2", "--gpus-per-node", "2", *toy, "600")
    jobs.await_text(job, 2, "step 1")
    killed = time.monotonic()
    os.kill(jobs.pid(job, 2), signal.SIGKILL)
    assert jobs.wait(job, 30) == "FAILED"
    assert time.monotonic() - killed < 15
    assert is_gone(jobs.run_dir(job), 1)
    ranks = {row["rank"]: row for row in jobs.status(job)["ranks"]}
    assert ranks[2]["signal"] == signal.SIGKILL
    failed = jobs.gptctl("logs", job, "--failed").stdout
    assert failed.index("rank 2") < min(failed.find(f"rank {rank}") for rank in (0, 1, 3) if f"rank {rank}" in failed)
    assert "SIGKILL" in failed.splitlines()[0] + failed.splitlines()[1]


def test_a_failed_attempt_is_started_again_and_resumes(jobs) -> None:
    """The oracle is the same job, uninterrupted: the losses are equal, step by step. The rank that is left does not wait for
    fixed times, which were 2.2 s; `tests/bench/restart.py` measures what it takes."""
    jobs.gptctl("init")
    asked = [
        "--nodes",
        "2",
        "--gpus-per-node",
        "1",
        *SMALL,
        "-o",
        "Engine.max_steps=400",
        "-o",
        "Engine.save_load.save_steps=20",
    ]
    job = jobs.submit(*asked, "--max-restarts", "1")
    jobs.await_text(job, 0, "global step 60,")
    os.kill(jobs.pid(job, 1), signal.SIGKILL)
    assert jobs.wait(job, 100) == "COMPLETED"
    assert jobs.status(job)["attempts"] == 2
    files = [jobs.run_dir(job) / "attempt-0" / f"ranks.{node}.jsonl" for node in range(2)]
    left, killed = (json.loads(file.read_text().splitlines()[-1]) for file in files)
    assert (killed["signal"], left["exit"]) == (signal.SIGKILL, 3)
    assert 0 < left["clock"] - killed["clock"] < 2
    again = losses(jobs.log(job, 0, attempt=1))
    assert min(again) > 20
    assert min(again) % 20 == 1
    whole = jobs.gptctl("rerun", job, "--json")
    other = json.loads(whole.stdout)["job"]
    assert jobs.wait(other, 100) == "COMPLETED"
    expected = losses(jobs.log(other, 0))
    assert max(expected) == max(again) == 400
    both = {**losses(jobs.log(job, 0)), **again}
    assert both == expected


def test_what_cannot_be_helped_is_not_tried_again(jobs) -> None:
    (jobs.folder / "x.py").write_text("raise SystemExit(93)")
    job = jobs.submit("--max-restarts", "5", "--", "x.py")
    assert jobs.wait(job) == "FAILED"
    assert jobs.status(job)["attempts"] == 1


FULL = """
import os, sys, time
import torch
import trainer.train
from torch.distributed import DistBackendError
from trainer.__main__ import main

def full(*arguments):
    if os.environ["RANK"] == "1":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 1 has a total capacity of 79.15 GiB")
    while "out of memory" not in open(os.environ["GPTCTL_LOG_DIR"] + "/workerlog.1").read():
        time.sleep(0.01)
    raise DistBackendError("NCCL error in: x.cpp:94, remote process exited or there was a network error")

trainer.train.update_weights = full
sys.exit(main(sys.argv[1:]))
"""


def test_a_full_gpu_is_named_and_not_tried_again(jobs) -> None:
    """The rank that was full, though NCCL fails on the other one, too; its log says which changes would fit."""
    (jobs.folder / "x.py").write_text(FULL)
    sizes = "Model.num_layers=1 Model.hidden_size=8 Model.num_attention_heads=1 Data.Train.dataset.max_seq_len=8"
    data = "Global.device=cpu Data.Train.dataset.name=CharDataset Data.Train.dataset.path=builtin"
    keys = ["Model.name=GPT", *sizes.split(), *data.split()]
    job = jobs.submit("--gpus-per-node", "2", "--max-restarts", "5", "--", "x.py", *keys)
    assert jobs.wait(job) == "FAILED"
    status = jobs.status(job)
    assert status["attempts"] == 1
    assert status["failure"]["rank"] == 1
    assert status["reason"].startswith("rank 1 (node 0): out of memory at global step 1: ")
    assert status["reason"].endswith("; a restart would fail in the same way")
    assert re.search("hint: (any one of these changes|this change) is enough: ", jobs.log(job, 1))


def test_torchrun_restarts_a_c10d_job_by_itself(jobs) -> None:
    """Two agents, one rank killed: torchrun starts all ranks again, and they go on from the last checkpoint."""
    jobs.gptctl("init")
    asked = [
        "--nodes",
        "1:2",
        "--gpus-per-node",
        "1",
        *SMALL,
        "-o",
        "Engine.max_steps=400",
        "-o",
        "Engine.save_load.save_steps=20",
    ]
    job = jobs.submit(*asked, "--max-restarts", "2")
    jobs.await_text(job, 0, "global step 60,")
    os.kill(jobs.pid(job, 1), signal.SIGKILL)
    assert jobs.wait(job, 120) == "COMPLETED"
    assert jobs.status(job)["attempts"] == 1
    log = jobs.log(job, 0)
    assert "Try to load checkpoint" in log
    assert sorted(losses(log)) == list(range(1, 401))


def test_cancel_lets_the_trainer_save_and_leaves_no_process(jobs) -> None:
    jobs.gptctl("init")
    job = jobs.submit("--nodes", "2", "--gpus-per-node", "1", *SMALL, "-o", "Engine.max_steps=100000")
    jobs.await_text(job, 0, "global step 5,")
    answer = jobs.gptctl("cancel", job)
    assert answer.stdout == f"{job}: CANCELLED\n", answer.stderr
    assert processes_of(str(jobs.run_dir(job))) == []
    status = jobs.status(job)
    assert (status["state"], status["trainer"]["state"]) == ("CANCELLED", "stopped")
    assert list((jobs.run_dir(job) / "output").glob("step_*"))
    assert f"To resume: gptctl resume {job}." in (jobs.run_dir(job) / "logs/attempt-0/workerlog.0").read_text()
    assert jobs.gptctl("cancel", job).returncode == 0  # and again: nothing changes
    assert jobs.gptctl("wait", job).returncode == 1
    assert jobs.gptctl("submit", "--resume", job, *SMALL, "-o", "Engine.max_steps=100000", "--dry-run").returncode == 0


def test_a_program_that_ignores_every_signal_is_cancelled_too(jobs) -> None:
    (jobs.folder / "x.py").write_text(
        "import os, signal, subprocess, time\nfor s in (1, 2, 3, 10, 12, 15): signal.signal(s, signal.SIG_IGN)\n"
        "subprocess.Popen(['sleep', '600'], start_new_session=True)\nprint('ready', flush=True)\nwhile True: time.sleep(1)"
    )
    job = jobs.submit("--", "x.py")
    jobs.await_text(job, 0, "ready")
    assert jobs.gptctl("cancel", job, "--now").stdout == f"{job}: CANCELLED\n"
    assert processes_of(str(jobs.run_dir(job))) == []


def test_the_time_limit(jobs, toy) -> None:
    job = jobs.submit("--time", "0:04", "--gpus-per-node", "1", *toy, "600")
    assert jobs.wait(job, 60) == "TIMEOUT"
    assert is_gone(jobs.run_dir(job), 1)


def test_a_job_outlives_its_terminal(jobs, toy) -> None:
    """gptctl is started in a terminal of its own, which is closed then: its session gets SIGHUP."""
    command = [str(Path(sys.executable).with_name("gptctl")), "submit", "--gpus-per-node", "1", *toy, "30"]
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(jobs.folder)
        os.execve(command[0], command, {**os.environ, "HOME": str(jobs.folder / "home")})
    shown = b""
    while b"follow" not in shown:
        shown += os.read(terminal, 4096)
    os.waitpid(pid, 0)
    os.close(terminal)
    job = (jobs.folder / "runs" / "latest").resolve().name
    assert jobs.wait(job) == "COMPLETED"
    assert "step 29" in jobs.log(job, 0)


def test_a_killed_supervisor_is_no_end_of_the_job(jobs, toy) -> None:
    """The exit codes that the nodes wrote tell, and where there is none the job is lost, not completed."""
    finished = jobs.submit("--gpus-per-node", "1", *toy, "10")
    lost = jobs.submit("--gpus-per-node", "1", *toy, "600")
    for job in (finished, lost):
        jobs.await_text(job, 0, "step 1")
        os.kill(json.loads((jobs.run_dir(job) / "claim.json").read_text())["pid"], signal.SIGKILL)
    assert "supervisor was killed" in jobs.status(lost)["reason"]
    assert jobs.wait(finished, 30) == "COMPLETED"
    for pid in processes_of(str(jobs.run_dir(lost))):
        os.kill(pid, signal.SIGKILL)
    assert jobs.wait(lost, 10) == "LOST"


def test_a_job_of_before_the_machine_was_restarted_is_lost(jobs) -> None:
    job = jobs.quick()
    jobs.wait(job)
    folder = jobs.run_dir(job)
    claim = json.loads((folder / "claim.json").read_text())
    (folder / "claim.json").write_text(json.dumps({**claim, "boot": "another"}))
    (folder / "result.json").unlink()
    (folder / "attempt-0" / "node.0.exit").unlink()
    # What an earlier command saw is believed without any file of the run folder.
    assert jobs.status(job)["state"] == "COMPLETED"
    (jobs.folder / "home" / ".local" / "state" / "gptctl" / "jobs" / f"{job}.ended").unlink()
    status = jobs.status(job)
    assert (status["state"], "restarted" in status["reason"]) == ("LOST", True)
    (folder / "claim.json").write_text(json.dumps({**claim, "boot": "another", "host": "elsewhere"}))
    assert jobs.status(job)["state"] == "UNKNOWN"


def test_two_jobs_at_once_keep_their_own_worlds(jobs, toy) -> None:
    ids = [jobs.submit("--nodes", "2", "--gpus-per-node", "1", "--name", name, *toy, "3") for name in ("a", "b")]
    assert [jobs.wait(job) for job in ids] == ["COMPLETED"] * 2
    endpoints = {(jobs.run_dir(job) / "attempt-0" / "endpoint.json").read_text() for job in ids}
    assert len(endpoints) == 2
    assert all("world 2" in jobs.log(job, 0) for job in ids)


def test_rerun_and_show_from_the_saved_files(jobs) -> None:
    """A script that was changed and deleted since: the rerun is the job that was."""
    (jobs.folder / "x.py").write_text("import sys; print('as it was', sys.argv[1:])")
    job = jobs.submit("--gpus-per-node", "1", "--env", "MY_NAME=a b", "--", "x.py", "one two")
    (jobs.folder / "x.py").unlink()
    jobs.wait(job)
    answer = json.loads(jobs.gptctl("rerun", job, "--wait", "--json").stdout)
    assert answer["state"] == "COMPLETED"
    other = answer["job"]
    assert jobs.log(other, 0) == jobs.log(job, 0) == "as it was ['one two']\n"
    values = json.loads(jobs.gptctl("show", other, "Launch.env", "--json").stdout)["values"]
    assert {row["key"]: row["value"] for row in values}["Launch.env.MY_NAME"] == "a b"
    table = jobs.gptctl("show", job, "Launch.env.MY_NAME").stdout
    assert "--env MY_NAME" in table
    assert jobs.gptctl("show", job, "--script").stdout == (jobs.run_dir(job) / "launch.sh").read_text()
    assert jobs.gptctl("show", job, "Lunch").returncode == 2


def test_variables_reach_every_rank_and_only_those_that_are_meant(jobs) -> None:
    """From profile, config and command line, each winning over the one before; nothing of a launcher around gptctl."""
    (jobs.folder / "x.py").write_text(
        "import os; print({n: v for n, v in os.environ.items() if n.startswith(('SLURM', 'NCCL', 'LEAK', 'WORLD'))})"
    )
    (jobs.folder / "lab.yaml").write_text("kind: local\nenv: {NCCL_A: profile, NCCL_B: profile, NCCL_C: profile}\n")
    (jobs.folder / "run.yaml").write_text("Launch: {cluster: ./lab.yaml, env: {NCCL_B: config, NCCL_C: config}}\n")
    around = {
        "SLURM_CPU_BIND": "x",
        "SLURM_JOB_ID": "7",
        "WORLD_SIZE": "64",
        "RANK": "3",
        "PET_NNODES": "3",
        "LEAK": "wanted",
    }
    asked = ["run.yaml", "--nodes", "2", "--gpus-per-node", "1", "--env", "NCCL_C=it's"]
    job = jobs.submit(*asked, "--", "x.py", **around)
    assert jobs.wait(job) == "COMPLETED"
    meant = {
        "NCCL_A": "profile",
        "NCCL_B": "config",
        "NCCL_C": "it's",
        "NCCL_DEBUG": "WARN",
        "LEAK": "wanted",
        "WORLD_SIZE": "2",
    }
    for rank in (0, 1):
        assert eval(jobs.log(job, rank)) == meant


# Where the port of the rendezvous listens, by the kernel's own table: addresses in hexadecimal.
LISTENING = """
port = f":{int(os.environ['MASTER_PORT']):04X}"
rows = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}")]
print(*[row[1] for row in rows if row[1].endswith(port) and row[3] == "0A"])
"""


def test_a_secret_is_in_the_rank_and_nowhere_else(jobs) -> None:
    """The key of checkpoints, as users name it. The store of the job listens on the loopback address only."""
    (jobs.folder / "x.py").write_text(
        "import os, hashlib; print(hashlib.sha256(os.environ['GPTCTL_CHECKPOINT_KEY'].encode()).hexdigest())"
        + LISTENING
    )
    (jobs.folder / "token").write_text("s3cret value\n")
    asked = ["-o", "Launch.secrets={GPTCTL_CHECKPOINT_KEY: {file: token}, OTHER: {env: MY_OTHER}}"]
    refused = jobs.gptctl("submit", *asked, "--", "x.py")
    assert "S007" in refused.stderr
    job = jobs.submit(*asked, "--", "x.py", MY_OTHER="0ther")
    assert jobs.wait(job) == "COMPLETED"
    import hashlib

    digest, *addresses = jobs.log(job, 0).split()
    assert digest == hashlib.sha256(b"s3cret value").hexdigest()
    assert [address.partition(":")[0] for address in addresses] == ["0100007F"]
    for file in [*jobs.run_dir(job).rglob("*"), *(jobs.folder / "home").rglob("*")]:
        if file.is_file():
            assert b"s3cret" not in file.read_bytes(), file
            assert b"0ther" not in file.read_bytes(), file


def test_a_node_that_waits_for_a_failed_one_is_ended(jobs) -> None:
    """No collective tells it: a rank of one node fails, that of the other would sleep for ever."""
    (jobs.folder / "x.py").write_text(
        "import os, time\nif os.environ['RANK'] == '1': raise SystemExit(5)\ntime.sleep(600)"
    )
    job = jobs.submit("--nodes", "2", "--gpus-per-node", "1", "--", "x.py")
    assert jobs.wait(job, 40) == "FAILED"
    assert is_gone(jobs.run_dir(job), 1)
    facts = jobs.status(job)
    assert facts["reason"] == "rank 1 (node 1): exit code 5"
    assert (facts["exit_codes"], facts["stopped_nodes"]) == ({"0": 137, "1": 1}, [0])
    assert "node 0: 137 (stopped by gptctl), node 1: 1" in jobs.gptctl("status", job).stdout
    assert f"{job}: FAILED: rank 1 (node 1): exit code 5" in jobs.gptctl("logs", job, "--failed").stdout


def test_daemons_that_hide_do_not_outlive_their_job(jobs) -> None:
    """Without the job's environment, and in a session of their own."""
    (jobs.folder / "x.py").write_text(
        "import subprocess\nprint(subprocess.Popen(['sleep', '611'], env={}, start_new_session=True).pid)"
    )
    job = jobs.submit("--", "x.py")
    assert jobs.wait(job) == "COMPLETED"
    pid = int(jobs.log(job, 0))
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and "sleep" in Path(f"/proc/{pid}/cmdline").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_job_whose_folder_is_deleted_is_known_and_can_be_cancelled(jobs) -> None:
    (jobs.folder / "x.py").write_text("import time\nprint('on', flush=True)\ntime.sleep(600)")
    job = jobs.submit("--", "x.py")
    jobs.await_text(job, 0, "on")
    shutil.rmtree(jobs.run_dir(job))
    status = jobs.status(job)
    assert (status["state"], "is missing" in status["reason"]) == ("RUNNING", True)
    for verb in (["show", job], ["logs", job], ["logs", job, "--failed"], ["rerun", job]):
        answer = jobs.gptctl(*verb)
        assert answer.returncode == 3, verb
        assert "missing" in answer.stderr, verb
    jobs.gptctl("cancel", job)
    assert is_gone(jobs.run_dir(job), 1)
    assert jobs.status(job)["state"] == "LOST"
    assert jobs.gptctl("logs", job, "--follow").returncode == 1


def test_cancel_before_any_rank_runs_is_quick(jobs) -> None:
    (jobs.folder / "slow.yaml").write_text("kind: local\nsetup: [sleep 60, touch after]\n")
    job = jobs.submit("--cluster", "./slow.yaml", "--", "x.py")
    began = time.monotonic()
    assert jobs.gptctl("cancel", job).stdout == f"{job}: CANCELLED\n"
    assert time.monotonic() - began < 10
    assert not (jobs.folder / "after").exists()


def test_a_job_without_its_supervisor_is_still_asked_to_save(jobs) -> None:
    jobs.gptctl("init")
    job = jobs.submit("--gpus-per-node", "1", *SMALL, "-o", "Engine.max_steps=100000")
    jobs.await_text(job, 0, "global step 5,")
    os.kill(json.loads((jobs.run_dir(job) / "claim.json").read_text())["pid"], signal.SIGKILL)
    assert jobs.gptctl("cancel", job).returncode == 0
    assert processes_of(str(jobs.run_dir(job))) == []
    assert jobs.status(job)["trainer"]["state"] == "stopped"


def test_a_hopeless_rank_is_not_started_again_by_torchrun_either(jobs) -> None:
    (jobs.folder / "x.py").write_text("print('once', flush=True)\nraise SystemExit(93)")
    job = jobs.submit("--nodes", "1:2", "--gpus-per-node", "1", "--max-restarts", "3", "--", "x.py")
    assert jobs.wait(job) == "FAILED"
    assert jobs.log(job, 0).count("once") == 1


def test_a_module_of_the_working_folder_does_not_break_torchrun(jobs) -> None:
    """Python puts the current folder first: a queue.py there would be torch's queue."""
    (jobs.folder / "queue.py").write_text("raise SystemExit('the wrong queue')")
    (jobs.folder / "sub").mkdir()
    (jobs.folder / "sub" / "x.py").write_text("import os; print(os.getcwd())")
    job = jobs.submit("--", "sub/x.py")
    assert jobs.wait(job) == "COMPLETED", jobs.gptctl("logs", job).stdout
    assert jobs.log(job, 0).strip() == str(jobs.folder)


def test_own_templates_beside_the_config(jobs) -> None:
    (jobs.folder / "templates").mkdir()
    (jobs.folder / "run.yaml").write_text("Launch: {entrypoint: x.py, cluster: ./quick.yaml}\n")
    own = jobs.folder / "templates" / "environment.sh.j2"
    own.write_text("export MINE={{ job_id }}\n")
    job = jobs.submit("run.yaml", "--trust")
    assert f"export MINE={job}\n" in (jobs.run_dir(job) / "launch.sh").read_text()
    jobs.wait(job)
    own.write_text("export MINE=not-any-more\n")
    again = json.loads(jobs.gptctl("rerun", job, "--json").stdout)["job"]
    assert again == f"{job}-2"
    assert f"export MINE={again}\n" in (jobs.run_dir(again) / "launch.sh").read_text()
    own.write_text("if then\n")
    # A changed file is not even rendered before it is trusted again.
    assert "has changed since you trusted it" in jobs.gptctl("submit", "run.yaml").stderr
    assert "bash cannot parse launch.sh" in jobs.gptctl("submit", "run.yaml", "--trust").stderr
    own.write_text("export MINE={{ jobid }}\n")
    refused = jobs.gptctl("submit", "run.yaml", "--trust")
    assert refused.returncode == 2
    assert "unknown variable jobid; did you mean job_id?" in refused.stderr


@pytest.mark.parametrize("code", ["0", "3"])
def test_wait_and_follow_return_the_verdict(jobs, code: str) -> None:
    for verb in ("--wait", "--follow"):
        answer = jobs.gptctl("submit", "--cluster", "./quick.yaml", verb, "--", "x.py", QUICK_CODE=code)
        assert answer.returncode == (0 if code == "0" else 1), answer.stderr


def test_a_failing_setup_line_ends_the_job_and_says_which(jobs) -> None:
    (jobs.folder / "bad.yaml").write_text(
        "kind: local\nsetup: ['true', 'no_such_command --load cuda', 'touch after']\n"
    )
    job = jobs.submit("--cluster", "./bad.yaml", "--", "x.py")
    assert jobs.wait(job) == "FAILED"
    assert "setup failed: no_such_command --load cuda" in jobs.gptctl("logs", job).stdout
    assert "setup failed: no_such_command" in jobs.status(job)["reason"]
    assert not (jobs.folder / "after").exists()
    assert subprocess.run(["pgrep", "-f", str(jobs.run_dir(job))]).returncode == 1
