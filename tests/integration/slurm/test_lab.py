"""The lab itself: that it is a cluster, that it fails as clusters do, and that it leaves nothing. The oracles are Slurm and the kernel."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.lab import Lab
from tests.lab.machines import await_true
from tests.lab.proxy import Mode

OWNER = "import sys; from tests.lab import Lab; lab = Lab(nodes=1).__enter__(); print(lab.folder, flush=True); sys.stdin.read()"


def submit(lab: Lab, *options: str, script: str = "sleep 600") -> str:
    """The id of a job of the real sbatch."""
    answer = lab.run("head", "sbatch", "--parsable", *options, "--wrap", script, check=True)
    return answer.stdout.strip()


def job_field(lab: Lab, job: str, field: str) -> str:
    text = lab.slurm.ask("scontrol", "show", "job", "--oneliner", job)
    return dict(word.split("=", 1) for word in text.split() if "=" in word).get(field, "")


def await_field(lab: Lab, job: str, field: str, value: str, seconds: float = 30) -> None:
    await_true(lambda: job_field(lab, job, field) == value, f"{field} of job {job} is {value}", seconds)


def reaches_slurmd(lab: Lab, name: str) -> bool:
    script = f"import socket; socket.create_connection(({name!r}, 6818), timeout=0.5)"
    return not lab.run("head", sys.executable, "-c", script).returncode


def processes_in(namespaces: set[str]) -> list[str]:
    """Processes that live in one of these network namespaces."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "ns/net") in namespaces:
                found.append(process.name)
        except OSError:
            continue
    return found


def namespaces_of(lab: Lab) -> set[str]:
    names = ["head", *(machine.name for machine in [*lab.nodes, *lab.hosts])]
    return {lab.run(name, "readlink", "/proc/self/ns/net", check=True).stdout.strip() for name in names}


def children(process: subprocess.Popen[str]) -> str:
    return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()


def links() -> list[str]:
    return sorted(path.name for path in Path("/sys/class/net").iterdir())


def test_a_job_runs_on_machines_with_their_own_names_and_addresses(lab: Lab) -> None:
    answer = lab.run(
        "head", "srun", "-N2", "sh", "-c", 'echo $(hostname) $(hostname -I) "$CUDA_VISIBLE_DEVICES"', check=True
    )
    assert sorted(line.split()[:2] for line in answer.stdout.splitlines()) == [
        ["node1", "10.77.0.11"],
        ["node2", "10.77.0.12"],
    ]
    gpus = lab.run("head", "srun", "-N2", "--gpus-per-node=2", "printenv", "CUDA_VISIBLE_DEVICES", check=True)
    assert gpus.stdout.split() == ["0,1", "0,1"]
    refused = lab.run("head", "sbatch", "--gpus-per-node=3", "--wrap", "true")
    assert refused.returncode
    assert "not available" in refused.stderr


def test_the_small_partition_has_limits(lab: Lab) -> None:
    for options in (["-N2"], ["-t", "11"]):
        assert lab.run("head", "sbatch", "-p", "small", *options, "--wrap", "true").returncode, options


def test_an_ordinary_user_runs_this_interpreter_and_this_repository(lab: Lab) -> None:
    script = "import getpass, gptctl; print(getpass.getuser(), gptctl.__file__)"
    answer = lab.run("head", "srun", sys.executable, "-c", script, user="gpt", check=True)
    assert answer.stdout.split() == ["gpt", str(ROOT / "gptctl" / "__init__.py")]


def test_temporary_folders_are_the_same_inside(lab: Lab, tmp_path: Path) -> None:
    lab.run("node1", "touch", str(tmp_path / "file"), check=True)
    assert (tmp_path / "file").exists()


def test_a_crashed_node_is_gone_and_comes_back(lab: Lab) -> None:
    process = lab.start("node2", "sleep", "60")
    lab.crash("node2")
    assert process.wait(timeout=5) != 0
    assert not reaches_slurmd(lab, "node2")
    lab.restart("node2")
    assert lab.run("head", "srun", "-w", "node2", "hostname", check=True).stdout == "node2\n"


@pytest.mark.long
def test_slurm_notices_a_crash(lab: Lab) -> None:
    job = submit(lab, "-w", "node2", "--no-requeue")
    await_field(lab, job, "JobState", "RUNNING")
    lab.crash("node2")
    await_field(lab, job, "JobState", "NODE_FAIL", seconds=60)


def test_a_cut_cable_leaves_the_processes_alone(lab: Lab) -> None:
    process = lab.start("node2", "sleep", "60")
    assert reaches_slurmd(lab, "node2")
    lab.cut("node2")
    assert not reaches_slurmd(lab, "node2")
    assert process.poll() is None
    lab.restore("node2")
    await_true(lambda: reaches_slurmd(lab, "node2"), "node2 is back")
    process.kill()


def test_a_killed_command_is_dead_on_its_machine(lab: Lab) -> None:
    process = lab.start("node1", "sleep", "54321")
    await_true(lambda: lab.run("node1", "pgrep", "-f", "54321").stdout, "it runs")
    process.kill()
    await_true(lambda: not lab.run("node1", "pgrep", "-f", "54321").stdout, "it is dead")
    process = lab.start("node1", "sleep", "60")
    await_true(lambda: children(process), "it runs")
    lab.signal(process, signal.SIGINT)
    assert process.wait(timeout=5) == 128 + signal.SIGINT or process.returncode == -signal.SIGINT


def test_a_stopped_controller_does_not_answer(lab: Lab) -> None:
    lab.stop_controller()
    with pytest.raises(subprocess.TimeoutExpired):
        lab.run("head", "squeue", timeout=1)
    lab.continue_controller()
    lab.run("head", "squeue", check=True)


@pytest.mark.long
def test_a_killed_controller_keeps_the_queue(lab: Lab) -> None:
    job = submit(lab, "--hold")
    lab.await_saved()
    lab.kill_controller()
    assert not lab.run("head", "pgrep", "-x", "slurmctld").stdout
    lab.start_controller()
    assert job in lab.run("head", "squeue", "-h", "-o", "%A", check=True).stdout.split()


def test_the_proxy_loses_the_answer_of_a_submit_that_happened(lab: Lab) -> None:
    before = lab.faults()
    lab.proxy("drop-reply once")
    answer = lab.run("head", "sbatch", "--hold", "--job-name=lost", "--wrap", "true")
    assert answer.returncode
    assert lab.slurm.ask("squeue", "-h", "-o", "%j").split() == ["lost"]
    assert lab.faults() == before + 1
    submit(lab, "--hold")  # once was once


def test_the_proxy_loses_a_request(lab: Lab) -> None:
    lab.proxy("drop-request")
    assert lab.run("head", "sbatch", "--hold", "--wrap", "true").returncode
    assert lab.slurm.ask("squeue", "-h") == ""


@pytest.mark.long
def test_the_proxy_delays_an_answer(lab: Lab) -> None:
    lab.proxy("delay 0.7")
    begin = time.monotonic()
    lab.run("head", "squeue", check=True)
    assert time.monotonic() - begin > 0.7


def test_one_connection_may_be_meant() -> None:
    mode = Mode("drop-request at 3")
    assert [mode.next()[0] for _ in range(4)] == ["pass", "pass", "drop-request", "pass"]
    with pytest.raises(ValueError, match="no mode"):
        Mode("drop")


def test_random_faults_come_as_often_as_asked_and_are_repeatable() -> None:
    modes = [Mode("random 0.3 7"), Mode("random 0.3 7")]
    drawn, again = ([mode.next()[0] for _ in range(2000)] for mode in modes)
    assert drawn == again
    assert 500 < 2000 - drawn.count("pass") < 700
    assert set(drawn) == {"pass", "drop-reply", "drop-request"}


def test_clients_are_counted_broken_and_mended(lab: Lab) -> None:
    before = lab.count_of("squeue")
    lab.run("head", "squeue", check=True)
    lab.run("head", "/usr/bin/squeue", user="gpt", check=True)
    lab.run("node1", "squeue", check=True)  # not on the head
    assert lab.count_of("squeue") == before + 2
    assert abs(lab.calls()[-1][0] - time.time()) < 5
    lab.break_client("squeue", "echo no >&2; exit 7")
    for name in ("head", "node1"):
        answer = lab.run(name, "squeue")
        assert (answer.returncode, answer.stderr) == (7, "no\n")
    lab.break_client("squeue")
    for name in ("head", "node1"):
        assert "No such file" in lab.run(name, "squeue").stderr
    lab.restore_client("squeue")
    lab.run("node1", "squeue", check=True)


@pytest.mark.long
def test_after_a_test_everything_works_again(lab: Lab) -> None:
    for _ in range(5):
        submit(lab, "--exclusive", script="trap '' TERM; while true; do sleep 1; done")
    lab.break_client("srun", "exit 1")
    lab.proxy("drop-reply")
    lab.crash("node1")
    lab.cut("node2")
    lab.stop_controller()
    lab.tidy()
    hosts = lab.run("head", "srun", "-N4", "--exclusive", "hostname", check=True).stdout.split()
    assert sorted(hosts) == ["node1", "node2", "node3", "node4"]


@pytest.mark.long
@pytest.mark.usefixtures("possible")
def test_a_higher_partition_preempts_and_the_victim_waits_again() -> None:
    with Lab(nodes=1, grace=0) as lab:
        victim = submit(lab, "--exclusive")
        await_field(lab, victim, "JobState", "RUNNING")
        winner = submit(lab, "--exclusive", "-p", "high")
        await_field(lab, winner, "JobState", "RUNNING")
        await_field(lab, victim, "Restarts", "1")
        assert job_field(lab, victim, "JobState") == "PENDING"


@pytest.mark.long
@pytest.mark.usefixtures("possible")
@pytest.mark.parametrize("user_signal", [True, False])
def test_a_preempted_job_gets_the_signal_that_it_asked_for(user_signal: bool) -> None:
    """What the site's `preempt_send_user_signal` means. Any grace up to 10 s takes 11."""
    script = "trap 'touch ~/told' USR1; sleep 600 & wait; wait"
    with Lab(nodes=1, grace=5, user_signal=user_signal) as lab:
        victim = submit(lab, "--exclusive", "--signal=B:USR1@60", script=script)
        await_field(lab, victim, "JobState", "RUNNING")
        time.sleep(1)
        submit(lab, "--exclusive", "-p", "high")
        await_field(lab, victim, "Restarts", "1")
        told = lab.run("head", "test", "-e", "told").returncode == 0
        assert told == user_signal


@pytest.mark.long
def test_sacct_answers(lab_with_accounting: Lab) -> None:
    lab = lab_with_accounting
    job = submit(lab, script="exit 3")
    ask = ["sacct", "-X", "-n", "-P", "-j", job, "-o", "State,ExitCode"]
    await_true(lambda: lab.run("head", *ask).stdout.strip() == "FAILED|3:0", "sacct knows how the job ended")
    lab.stop_accounting()
    assert lab.run("head", *ask).returncode
    lab.start_accounting()
    assert lab.run("head", *ask, check=True).stdout.strip() == "FAILED|3:0"


@pytest.mark.long
@pytest.mark.usefixtures("possible")
def test_ssh_hosts_accept_the_key_and_the_bastion_leads_on(tmp_path: Path) -> None:
    with Lab(nodes=0, ssh=1) as lab:
        pinned = f"-oUserKnownHostsFile={lab.known_hosts}"
        for user in ("root", "gpt"):
            answer = lab.run(
                "head", "ssh", "-i", str(lab.key), pinned, f"{user}@ssh1", "hostname; whoami; touch ~/mine", check=True
            )
            assert answer.stdout.split() == ["ssh1", user]
            assert lab.run("head", "ssh", "ssh1", "ls", user=user, check=True).stdout == "mine\n"
        assert lab.run("head", "ls").stdout == "", "homes are private"
        assert lab.run("head", "ssh", "-oConnectTimeout=1", "private1", "hostname").returncode, "there is no direct way"
        config = tmp_path / "config"
        config.write_text(
            f"Host *\n ConnectTimeout 2\n IdentityFile {lab.key}\n UserKnownHostsFile {lab.known_hosts}\nHost private1\n ProxyJump bastion\n"
        )
        config.chmod(0o600)
        jump = ["ssh", "-F", str(config), "private1", "hostname"]
        assert lab.run("head", *jump, check=True).stdout == "private1\n"
        lab.restart_sshd("bastion")
        lab.crash("private1")
        # ssh's own limit is for the bastion. How soon that one gives up depends on its table of neighbours.
        assert lab.run("head", "timeout", "10", *jump).returncode
        lab.restart("private1")
        assert lab.run("head", *jump, check=True).stdout == "private1\n"


def test_nothing_is_left_and_labs_do_not_meet(lab: Lab, tmp_path: Path) -> None:
    before = links()
    with Lab(nodes=1, ssh=1) as other:  # beside the one of the session, with the same addresses
        spaces, folder = namespaces_of(other), other.folder
        assert len(processes_in(spaces)) > 5
        stopped = other.start("node1", "sleep", "60")
        await_true(lambda: children(stopped), "it runs")
        other.signal(stopped, signal.SIGSTOP)
        assert len(other.run("head", "sinfo", "-h", "-N", "-p", "main").stdout.splitlines()) == 1
    assert not processes_in(spaces)
    assert not folder.exists()
    assert str(folder) not in Path("/proc/self/mountinfo").read_text()
    assert links() == before
    assert len(lab.run("head", "sinfo", "-h", "-N", "-p", "main").stdout.splitlines()) == 4


@pytest.mark.usefixtures("possible")
def test_a_killed_owner_takes_everything_with_it() -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert owner.stdout
    folder = owner.stdout.readline().strip()

    def left() -> str:
        return subprocess.run(["pgrep", "-f", folder], capture_output=True, text=True).stdout

    assert len(left().split()) > 3
    owner.kill()
    owner.wait()
    await_true(lambda: not left() and not os.path.exists(folder), f"{folder} and its processes are gone", 10)


@pytest.mark.usefixtures("possible")
def test_a_shell_on_the_login_node() -> None:
    command = [
        sys.executable,
        "-m",
        "tests.lab",
        "--nodes",
        "1",
        "-c",
        "sinfo -h -p main -o %D; gptctl clusters show lab; exit 5",
    ]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 5
    assert answer.stdout.startswith("1\n")
    assert "gpus-per-node" in answer.stdout
