"""What gptctl does on a login host, without one. Oracles: bash itself, a stand-in for sbatch, and the files that are left."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from paramiko import SSHException

from gptctl.backends.slurm import login_access
from gptctl.backends.slurm.client import SlurmError
from gptctl.engine.contract import TOKEN
from gptctl.planning.build import cluster_as_json
from gptctl.remote import connection, fetch
from gptctl.remote.archive import pack
from gptctl.remote.connection import CommandResult
from gptctl.remote.copy_files import Part
from gptctl.remote.route import Route
from gptctl.remote.scripts import (
    START_MARKER,
    after_login,
    command_line,
    login_command,
    login_output,
    login_script,
    output_of,
    remote_command,
)
from gptctl.spec.cluster import Host, load_profile

HOSTILE = [
    "a b",
    "$HOME",
    "$(touch x)",
    "`id`",
    "'",
    '"',
    "\\",
    "*",
    "-n",
    "!!",
    "a;b",
    "é\u2028",
    "%s",
    "",
    "{3}>&1",
    "~",
]
# As users have them: it prints to both streams, and sets what a login needs.
BASH_PROFILE = "echo Welcome; echo 'stty: not a terminal' >&2; export FROM_PROFILE=yes PATH=$HOME/bin:$PATH\n"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / ".bash_profile").write_text(BASH_PROFILE)
    (tmp_path / "bin").mkdir()
    return tmp_path


def over_ssh(home: Path, command: list[str], stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run a command as sshd does: the login shell gets one line, and a small environment."""
    environment = {"HOME": str(home), "PATH": "/usr/bin:/bin"}
    line = command_line(command)
    done = subprocess.run(["sh", "-c", line], input=stdin, capture_output=True, env=environment, cwd=home)
    assert done.stdout.startswith(START_MARKER.encode())
    return subprocess.CompletedProcess(line, done.returncode, output_of(done.stdout), done.stderr)


def test_every_word_arrives_unchanged(home: Path) -> None:
    done = over_ssh(home, login_command("printf", "%s\\0", *HOSTILE, marker=START_MARKER))
    output = login_output(done.stdout) or b""
    assert output.decode().split("\0")[:-1] == HOSTILE
    assert {file.name for file in home.iterdir()} == {".bash_profile", "bin"}


def test_a_noisy_profile_changes_neither_output_nor_errors(home: Path) -> None:
    script = 'echo "$FROM_PROFILE"; echo wrong >&2; exit 3'
    done = over_ssh(home, login_command("bash", "-c", script, marker=START_MARKER))
    assert (done.returncode, login_output(done.stdout)) == (3, b"yes\n")
    assert after_login(done.stderr.decode()) == "wrong"
    assert b"Welcome" in done.stderr


@pytest.mark.parametrize("profile", ["exec sh", "exit 0", "exec 2> /dev/null"])
def test_a_profile_that_leaves_the_shell_is_not_an_empty_answer(home: Path, profile: str) -> None:
    """Such a login shell exits with code 0 and prints nothing, like squeue for a job that has left the queue."""
    (home / ".bash_profile").write_text(profile)
    done = over_ssh(home, login_command("printf", "", marker=START_MARKER))
    assert done.returncode == 0
    assert login_output(done.stdout) == (b"" if "2>" in profile else None)


@pytest.mark.parametrize(
    ("code", "out", "said", "is_doubtful"),
    [
        (137, f"{START_MARKER}\n", "sbatch was killed on hpc", True),
        (1, f"{START_MARKER}\n", "invalid account", False),
        (0, "", "login host hpc: its login shell exited before it ran sbatch", False),
        (0, f"{START_MARKER}\nwelcome\n", "unexpected reply of sbatch on hpc: 'welcome'", True),
    ],
)
def test_replies_to_sbatch(monkeypatch, tmp_path: Path, code: int, out: str, said: str, is_doubtful: bool) -> None:
    """Doubtful: gptctl looks for the job in the queue before it says that nothing was submitted."""
    cluster = SimpleNamespace(login=SimpleNamespace(name="hpc"))
    link = SimpleNamespace(route=SimpleNamespace(name="hpc"))
    monkeypatch.setattr(login_access, "login_link", lambda cluster, limit: link)
    access = login_access.LoginAccess(cluster, print)  # type: ignore[arg-type]
    done = CommandResult(code, out.encode(), f"{START_MARKER}\nsbatch: error: invalid account")
    monkeypatch.setattr(access, "run", lambda *words: done)
    monkeypatch.setattr(login_access, "submitted_comment", lambda *words: "")
    plan, record = SimpleNamespace(secret_variables=()), SimpleNamespace(remote_dir="/r", token="t")
    with pytest.raises(SlurmError) as error:
        access.sbatch(plan, record)  # type: ignore[arg-type]
    assert (error.value.detail, error.value.is_doubtful) == (said, is_doubtful)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (SSHException("Error reading SSH protocol banner"), "me@h:22 does not answer as an ssh server"),
        (TimeoutError(), "me@h:22 does not answer"),
    ],
)
def test_a_host_that_is_no_ssh_server(error: Exception, said: str) -> None:
    """A web server does answer."""
    route = Route("h", "h", 22, "me", (), ("/known",))
    assert connection._connect_error(route, error).detail == said


@pytest.mark.parametrize("name", ["short", "n" * 255, "é" * 127, "\udcff" * 255])
def test_any_file_name_has_room_for_an_unfinished_copy(tmp_path: Path, name: str) -> None:
    """Oracle: the file system. Two files have two copies, and so have two hosts."""
    hosts: list[Any] = [SimpleNamespace(route=SimpleNamespace(name=host)) for host in ("gpu1", "gpu2")]
    parts = [Part(f"/r/{each}", tmp_path / each, 1, 1_700_000_000) for each in (name, f"{name[:-1]}x")]
    copies = {fetch._unfinished(tmp_path, host, part) for host in hosts for part in parts}
    for copy in copies:
        copy.parent.mkdir(exist_ok=True)
        copy.touch()
    assert len(copies) == 4


def test_stdin_is_the_commands_own(home: Path) -> None:
    assert over_ssh(home, login_command("cat"), b"script\n").stdout == b"script\n"


class Cluster:
    """A job's folder, and an sbatch that notes its words and variables."""

    def __init__(self, home: Path) -> None:
        self.home, self.folder = home, home / "runs" / "job 1"
        sbatch = home / "bin" / "sbatch"
        sbatch.write_text(
            '#!/bin/sh\nprintf "%s\\n" "$SECRET" "$@" >> "$HOME/calls"\ncat "$HOME/reply"; exit "$(cat "$HOME/code")"\n'
        )
        sbatch.chmod(0o755)
        (home / "reply").write_text("42;cluster\n")
        (home / "code").write_text("0")

    def place(self, archive: bytes, size: int | None = None, *inputs: str) -> subprocess.CompletedProcess[bytes]:
        words = (str(self.folder), "token", str(size or len(archive)), "5", str(self.folder / "logs"), *inputs)
        return over_ssh(self.home, remote_command("place_job.sh", *words), archive)

    def submit(self, number: int, comment: str = "token", stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        words = (str(self.folder), "token", str(number), comment, "job.sbatch")
        return over_ssh(self.home, login_script("submit_job.sh", *words), stdin)

    def claim(self, claim: dict[str, Any]) -> subprocess.CompletedProcess[bytes]:
        return over_ssh(self.home, remote_command("claim_job.sh", str(self.folder), "token", json.dumps(claim)))

    def calls(self) -> list[str]:
        file = self.home / "calls"
        return file.read_text().splitlines() if file.exists() else []

    def left(self) -> set[str]:
        return {str(file.relative_to(self.home / "runs")) for file in (self.home / "runs").glob("*")}


@pytest.fixture
def archive(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("job")
    (folder / TOKEN).write_text("token")
    (folder / "job.sbatch").write_text("#!/bin/sh\n")
    (folder / "code").mkdir()
    (folder / "code" / "data").write_bytes(os.urandom(10_000))
    return pack(folder)


@pytest.fixture
def cluster(home: Path) -> Cluster:
    return Cluster(home)


def test_a_folder_arrives_once(cluster: Cluster, archive: bytes) -> None:
    done = cluster.place(archive, None, "/nowhere/data", str(cluster.home))
    assert (done.returncode, done.stdout) == (0, b"/nowhere/data\n"), done.stderr
    (cluster.folder / "claim.json").write_text("{}")
    assert cluster.place(archive).returncode == 0  # again, after a lost reply: nothing is replaced
    assert (cluster.folder / "claim.json").exists()
    assert (cluster.folder / "logs").is_dir()
    assert cluster.left() == {"job 1"}
    assert cluster.folder.stat().st_mode & 0o777 == 0o700


def test_a_part_of_a_folder_is_none(cluster: Cluster, archive: bytes) -> None:
    done = cluster.place(archive[: len(archive) // 2], len(archive))
    assert done.returncode == 74
    assert cluster.left() == set()


def test_the_folder_of_another_job_stays(cluster: Cluster, archive: bytes) -> None:
    cluster.folder.mkdir(parents=True)
    (cluster.folder / TOKEN).write_text("other")
    done = cluster.place(archive)
    assert done.returncode == 73
    assert b"belongs to another job" in done.stderr
    over_ssh(cluster.home, remote_command("withdraw_job.sh", str(cluster.folder), "token"))
    assert cluster.left() == {"job 1"}
    assert cluster.submit(1).returncode == 66
    assert cluster.claim({"abandoned": True}).returncode == 66


def test_a_repeated_request_submits_once(cluster: Cluster, archive: bytes) -> None:
    """Words and secrets arrive as they are; the second request gets the reply of the first."""
    cluster.place(archive)
    comment = "token it's $HOME"
    first = cluster.submit(1, comment, b"SECRET=s 'x' $y\0")
    assert (first.returncode, login_output(first.stdout)) == (0, b"42;cluster\n"), first.stderr
    assert login_output(cluster.submit(2, comment).stdout) == b"42;cluster\n"
    assert cluster.calls() == ["s 'x' $y", "--parsable", "--hold", f"--comment={comment}", "job.sbatch"]


def test_a_request_that_the_network_delayed_is_ignored(cluster: Cluster, archive: bytes) -> None:
    """Its repetition came first, and failed: gptctl has told the user so."""
    cluster.place(archive)
    (cluster.home / "code").write_text("1")
    assert cluster.submit(2).returncode == 1
    calls = len(cluster.calls())
    assert cluster.submit(1).returncode == 75
    assert len(cluster.calls()) == calls


def test_the_first_claim_stays(cluster: Cluster, archive: bytes) -> None:
    cluster.place(archive)
    mine = {"scheduler_id": "42", "host": "hpc"}
    for claim in (mine, {"abandoned": True}):
        assert json.loads(cluster.claim(claim).stdout) == mine
    assert f'"scheduler_id": "{42}"' in (cluster.folder / "claim.json").read_text()  # as job.sbatch looks for it
    assert {file.name for file in cluster.folder.iterdir()} == {TOKEN, "job.sbatch", "code", "logs", "claim.json"}


def test_a_job_is_taken_back(cluster: Cluster, archive: bytes) -> None:
    cluster.place(archive)
    (cluster.home / "runs" / ".job 1.token.77").mkdir()  # of a request that was killed
    over_ssh(cluster.home, remote_command("withdraw_job.sh", str(cluster.folder), "token"))
    assert cluster.left() == set()


# The profile

SLURM = "kind: slurm\nrun_root: /r\n"


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("login: hpc\n", Host(host="hpc")),
        ("login: me@hpc.example.org\n", Host(host="hpc.example.org", user="me")),
        ("login: {host: hpc, port: 2222, proxy_jump: gate}\n", Host(host="hpc", port=2222, proxy_jump="gate")),
        ("login:\n", None),
    ],
)
def test_a_login_host_in_a_profile(tmp_path: Path, text: str, host: Host | None) -> None:
    file = tmp_path / "hpc.yaml"
    file.write_text(SLURM + text)
    profile = load_profile(str(file))
    assert (profile.findings, profile.cluster.login) == ((), host)
    assert profile.cluster.sees_files is (host is None)
    frozen = tmp_path / "cluster.json"
    frozen.write_text(json.dumps(cluster_as_json(profile.cluster)))
    again = load_profile(str(frozen))
    assert (again.findings, again.cluster) == ((), replace(profile.cluster))


@pytest.mark.parametrize(
    ("text", "code", "line", "hint"),
    [
        ("kind: local\nlogin: hpc\n", "P005", 2, "set kind: slurm"),
        ("kind: ssh\nrun_root: /r\nhosts: [a]\nlogin: hpc\n", "P005", 4, "list the host in hosts"),
        (f"{SLURM}login: 'a b'\n", "C011", 3, ""),
        (f"{SLURM}login: {{host: a, prt: 1}}\n", "C011", 3, "port"),
        (f"{SLURM}logn: a\n", "C010", 3, "login"),
        ("kind: local\nidentity_file: /k\n", "P003", 2, ""),
    ],
)
def test_mistakes_about_login_hosts(tmp_path: Path, text: str, code: str, line: int, hint: str) -> None:
    file = tmp_path / "hpc.yaml"
    file.write_text(text)
    (found,) = load_profile(str(file)).findings
    assert (found.code, found.place and found.place.line) == (code, line)
    assert found.level == ("warning" if code == "P003" else "error")
    assert hint in found.hint
