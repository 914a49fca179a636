"""Plans and the scripts made from them. Oracles: golden files, bash and shellcheck, and what arrives in real processes.

`GOLDEN=update pytest tests/unit/test_render.py` writes the golden files again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gptctl.backends import Backends
from gptctl.engine.contract import AGENT_SCRIPT as AGENT
from gptctl.engine.contract import BATCH_SCRIPT as BATCH
from gptctl.engine.contract import LAUNCH_SCRIPT as LAUNCH
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.planning.build import IN_PLACE, JobIdentity, Site
from gptctl.planning.render import check_syntax, render, script_of
from gptctl.planning.user_templates import named_templates
from gptctl.spec.check import Checked, check_config
from gptctl.spec.cluster import load_profile
from tests.conftest import ROOT
from trainer.config import Override
from trainer.errors import UserError

GOLDEN = ROOT / "tests" / "golden"
SITE = Site("/home/me/work", "/venv/bin/python", "/venv/lib/trainer")
JOB = JobIdentity("gpt-3f9a2c", "/home/me/work/runs/gpt-3f9a2c")
SCRIPT = Override("Launch.entrypoint", "multigpu_torchrun.py", "--", verbatim=True)
ARGUMENTS = Override("Launch.args", ("--batch_size", "32", "10", "5"), "--")

LOCAL = "name: lab\nkind: local\npython: python\n"
SETUP = LOCAL + "setup: [module load cuda/12, source /venv/bin/activate]\nenv: {NCCL_DEBUG: INFO}\n"
SSH = (
    "kind: ssh\ngpus_per_node: 2\nrun_root: /srv/runs\nhosts: [10.0.0.46, {host: b, address: 10.0.0.45}]\n"
    "env: {NCCL_IB_DISABLE: 1, NCCL_SOCKET_IFNAME: bond0}\n"
)
SLURM = (
    "kind: slurm\npartition: a800\ngpus_per_node: 4\ncpus_per_task: 16\nrun_root: /data/runs\nmaster_interface: bond0\n"
    "setup: [module load anaconda/3-2023.03, conda activate gpt]\nenv: {NCCL_IB_DISABLE: 1, NCCL_SOCKET_IFNAME: bond0}\n"
)
HOSTS = (
    "kind: ssh\ngpus_per_node: 2\nrun_root: /srv/runs\npython: /srv/venv/bin/python\nsetup: [module load cuda/12]\n"
    "hosts: [{host: a, interface: bond0}, {host: b, interface: eth1, proxy_jump: bastion}]\n"
)
CONTAINER = LOCAL + "container: {runtime: singularity, image: /images/gpt.sif, binds: ['/a b:/b:rw'], pwd: /b}\n"
PYXIS = SLURM.replace("module load anaconda/3-2023.03, conda activate gpt", "pip install -e 'x y'") + (
    "container: {runtime: pyxis, image: 'nvcr.io#nvidia/pytorch:24.01-py3', binds: ['/data:/data:ro'], pwd: /data}\n"
)

# name, profile, what is asked for, and whether it is the script of a job or one for pasting
CASES = {
    "job": (LOCAL, ["nodes=2", "gpus_per_node=2"], JOB),
    "job-setup": (SETUP, ["nodes=1", "gpus_per_node=2", "secrets={TOKEN: {file: t}, KEY: {env: MY_KEY}}"], JOB),
    "job-elastic": (LOCAL, ["nodes='1:2'", "gpus_per_node=2", "max_restarts=3"], JOB),
    "job-container": (CONTAINER, ["gpus_per_node=2"], JOB),
    "job-launch": (LOCAL, ["style=launch", "gpus_per_node=2"], JOB),
    "standalone": (LOCAL, ["style=standalone", "gpus_per_node=4"], IN_PLACE),
    "c10d": (LOCAL, ["style=c10d", "gpus_per_node=8", "rdzv={id: '100', endpoint: '127.0.0.1:29400'}"], IN_PLACE),
    "c10d-nodes": (SSH, ["style=c10d", "nodes=2"], IN_PLACE),
    "static": (SSH, ["style=static", "nodes=2"], IN_PLACE),
    "static-interfaces": (HOSTS, ["style=static", "nodes=2"], IN_PLACE),
    "devices": (LOCAL, ["devices='0,1,2,3,4,5,6,7'", "log_dir=dp8"], IN_PLACE),
    "launch": (LOCAL, ["style=launch", "gpus_per_node=8"], IN_PLACE),
    "container": (CONTAINER, ["gpus_per_node=2"], IN_PLACE),
    "srun-script": (SLURM, ["style=srun-script", "nodes=2"], IN_PLACE),
    "sbatch": (SLURM, ["nodes=2", "slurm={time: '12:00:00', extra: {exclude: 'a800-[07,09]'}}"], IN_PLACE),
    "sbatch-c10d": (SLURM, ["nodes='2:4'", "max_restarts=2", "rdzv.port=29400"], IN_PLACE),
    "pyxis-srun-script": (PYXIS, ["style=srun-script", "nodes=2"], IN_PLACE),
    "pyxis-sbatch": (PYXIS, ["nodes=2", "log_dir=logs"], IN_PLACE),
    "pyxis-loop": (PYXIS, ["style=loop", "nodes=2"], IN_PLACE),
    "pyxis-batch": (PYXIS, ["nodes=2"], JOB),
    "loop": (SLURM, ["style=loop", "nodes=2"], IN_PLACE),
    "batch": (SLURM, ["nodes=2", "max_restarts=2", "slurm={time: '1:00:00', extra: {exclusive: True}}"], JOB),
    "batch-script": (SLURM, ["nodes='2:4'", "max_restarts=2"], JOB),
    "agent": (HOSTS, ["nodes=2"], JOB),
    "job-ssh": (HOSTS, ["nodes=2", "secrets={KEY: {env: MY_KEY}}"], JOB),
}
WITH_SCRIPT = ("c10d", "c10d-nodes", "static", "launch", "job-launch", "batch-script")


def planned(checked: Checked, identity: JobIdentity) -> LaunchPlan:
    return Backends(print).of(checked.cluster.kind).plan(checked, SITE, identity)


def plan_of(folder: Path, profile: str, asked: list[str], identity: JobIdentity, *more: Override) -> LaunchPlan:
    (folder / "lab.yaml").write_text(profile)
    overrides = [Override.parse(f"Launch.{text}") for text in asked]
    checked = check_config(None, [Override("Launch.cluster", str(folder / "lab.yaml"), "--"), *overrides, *more])
    assert checked.is_valid, [str(finding) for finding in checked.findings]
    return planned(checked, identity)


def script_text(folder: Path, name: str) -> str:
    profile, asked, ground = CASES[name]
    plan = plan_of(folder, profile, asked, ground, *([SCRIPT, ARGUMENTS] if name in WITH_SCRIPT else []))
    of_job = AGENT if name == "agent" else BATCH if plan.kind == "slurm" else LAUNCH
    return render(plan, of_job if ground.remote_dir else script_of(plan.style))


@pytest.mark.parametrize("name", CASES)
def test_golden(tmp_path, name: str) -> None:
    """Byte for byte what is kept in tests/golden, which somebody has read."""
    text = script_text(tmp_path, name)
    file = GOLDEN / f"{name}.sh"
    if os.environ.get("GOLDEN") == "update":
        file.write_text(text)
    assert text == file.read_text()
    assert "set -x" not in text


def test_there_is_no_golden_file_without_a_case() -> None:
    assert {file.stem for file in GOLDEN.glob("*.sh")} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_bash_and_shellcheck_accept_every_script(name: str) -> None:
    """The oracles are `bash -n` and, where it is installed, shellcheck at its strictest."""
    file = str(GOLDEN / f"{name}.sh")
    assert subprocess.run(["bash", "-n", file]).returncode == 0
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed: apt-get install shellcheck")
    result = subprocess.run(
        ["shellcheck", "--severity=style", "--exclude=SC1091", file],  # SC1091: what setup lines source is not here
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout


def test_the_same_input_gives_the_same_bytes(tmp_path) -> None:
    first, second = (json.dumps(plan_of(tmp_path, SLURM, ["nodes=2"], JOB).as_json()) for _ in range(2))
    assert first == second
    assert script_text(tmp_path, "sbatch") == script_text(tmp_path, "sbatch")


def test_a_plan_survives_json(tmp_path) -> None:
    plan = plan_of(tmp_path, SETUP, ["nodes=2", "gpus_per_node=2", "secrets={A: {env: B}}"], JOB)
    kept = {**json.loads(json.dumps(plan.as_json())), "added_by_a_newer_gptctl": 1}
    assert LaunchPlan.from_json(kept) == plan


def test_flags_win_over_config_and_config_over_profile(tmp_path) -> None:
    """NCCL variables, as they reach the script, with where each came from."""
    (tmp_path / "lab.yaml").write_text("kind: local\nenv: {A: profile, B: profile, C: profile}\n")
    (tmp_path / "run.yaml").write_text(
        "Launch:\n  cluster: %s\n  env: {B: config, C: config}\n" % (tmp_path / "lab.yaml")
    )
    checked = check_config(tmp_path / "run.yaml", [Override("Launch.env.C", "flag", "--env C", verbatim=True)])
    plan = planned(checked, JOB)
    assert {name: plan.env[name] for name in "ABC"} == {"A": "profile", "B": "config", "C": "flag"}
    assert plan.env_origins["A"] == "profile lab"
    assert plan.env_origins["B"].endswith("run.yaml:3")
    assert plan.env_origins["C"] == "--env C"
    assert "export C=flag\n" in render(plan, LAUNCH)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ("{NCCL_SOCKET_IFNAME: bond0}", "bond0"),
        ("{NCCL_SOCKET_IFNAME: =bond0}", "bond0"),
        ("{NCCL_SOCKET_IFNAME: ^docker0}", "lo"),
        ("{NCCL_SOCKET_IFNAME: 'eth0,eth1'}", "lo"),
        ("{NCCL_SOCKET_IFNAME: bond0, GLOO_SOCKET_IFNAME: eth9}", "eth9"),
        ("{}", "lo"),
    ],
)
def test_gloo_uses_the_interface_that_nccl_uses(tmp_path, environment: str, expected: str) -> None:
    plan = plan_of(tmp_path, f"kind: local\nenv: {environment}\n", [], JOB)
    assert plan.env["GLOO_SOCKET_IFNAME"] == expected


# A user's own templates.


def test_an_old_batch_script_of_the_users_is_explained(tmp_path) -> None:
    """One that runs srun itself would have no engine: the error names what changed."""
    (tmp_path / "job.sbatch.j2").write_text("#!/usr/bin/env bash\nsrun bash launch.sh\n")
    plan = plan_of(tmp_path, SLURM, ["nodes=2"], JOB)
    text = render(plan, BATCH, named_templates(tmp_path))
    with pytest.raises(UserError, match="does not start gptctl's engine") as raised:
        check_syntax(BATCH, text)
    assert "templates/jobs/job.sbatch.j2" in raised.value.hint
    check_syntax(BATCH, render(plan, BATCH))


def test_a_template_of_the_users_replaces_ours(tmp_path) -> None:
    plan = plan_of(tmp_path, LOCAL, ["gpus_per_node=2"], JOB)
    own = tmp_path / "mine"
    own.mkdir()
    (own / "environment.sh.j2").write_text("# {{ job_id }} on ${#array[@]}\n")
    assert "# gpt-3f9a2c on ${#array[@]}\n" in render(plan, LAUNCH, named_templates(own))
    (own / "launch.sh.j2").write_text("echo {{ job_name }} {{ world }}\n")
    assert render(plan, LAUNCH, named_templates(own / "launch.sh.j2")) == "echo gpt 2\n"
    (own / "other.j2").write_text("")
    with pytest.raises(UserError, match="does not replace any template"):
        named_templates(own / "other.j2")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            "a\n{{ jobb_id }}\n{{ wrld }}\n",
            ["mine.sh.j2:2: unknown variable jobb_id; did you mean job_id?", ":3:", "world"],
        ),
        ("{{ job_id \n", ["mine.sh.j2:1"]),
        ("{% include 'nothing.j2' %}\n", ["unknown template: nothing.j2", "launch.sh.j2"]),
        ("{{ 1 / 0 }}\n", ["mine.sh.j2:1", "division by zero"]),
        ("a\n{{ env.no_such_name }}\n", ["mine.sh.j2:2", "no_such_name"]),
        ("{{ job_id.__class__.__mro__ }}\n", ["unsafe"]),
        ("{{ 9 ** (9 ** 9) }}\n", ["mine.sh.j2:1", "the result of ** is too large"]),
        ("{{ 'a' * 99999999999 }}\n", ["mine.sh.j2:1", "the result of * is too large"]),
        ("{{ [1] * 99999999999 }}\n", ["mine.sh.j2:1", "the result of * is too large"]),
        (f"{{{{ {'(' * 3000}1{')' * 3000} }}}}\n", ["nested too deep"]),
        ("{% include 'mine.sh.j2' %}\n", ["includes itself"]),
    ],
)
def test_a_wrong_template_is_explained(tmp_path, template: str, expected: list[str]) -> None:
    """No traceback: a UserError that names file, line, variable and its neighbours."""
    plan = plan_of(tmp_path, LOCAL, [], JOB)
    (tmp_path / "mine.sh.j2").write_text(template)
    with pytest.raises(UserError) as caught:
        render(plan, "mine.sh", named_templates(tmp_path))
    assert all(word in caught.value.message + caught.value.hint for word in expected), caught.value.message


def test_a_template_that_never_ends(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run renders templates that nobody has trusted yet."""
    monkeypatch.setattr("gptctl.planning.render.MAX_SECONDS", 0.5)
    plan = plan_of(tmp_path, LOCAL, [], JOB)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    (tmp_path / "mine.sh.j2").write_text(loop)
    with pytest.raises(UserError, match=r"took longer than 0\.5 s"):
        render(plan, "mine.sh", named_templates(tmp_path))
    (tmp_path / "mine.sh.j2").write_text("{{ 2 ** 10 }} {{ 'ab' * 2 }} {{ 3 * world }}\n")
    assert render(plan, "mine.sh", named_templates(tmp_path)) == "1024 abab 3\n"


# What arrives in a process, whatever the values are. The oracle is the process itself.

DUMP = "import json, os, sys; json.dump([sys.argv[1:], {k: os.environ.get(k) for k in ('A', 'B_2')}], open(os.environ['OUT'], 'w'))"
HOSTILE = [
    "",
    " ",
    "a b",
    "'",
    '"',
    "\\",
    "$(touch hit)",
    "`touch hit`",
    "$HOME",
    "%j",
    "#",
    "-x",
    "--",
    "*",
    "~",
    "é中文🏖",
    "a'b\"c$d`e",
    "!1",
    "{{ x }}",
    "; touch hit",
    "& touch hit",
    "x" * 4000,
]
words = st.one_of(
    st.sampled_from(HOSTILE), st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), max_size=30)
)


LINES = ["two\nlines", "a tab\tand\r\n", "\n"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arguments=st.lists(words | st.sampled_from(LINES), max_size=6), value=words)
@example(arguments=LINES, value="")
def test_any_word_arrives_unchanged(tmp_path, arguments: list[str], value: str) -> None:
    """Arguments and variables through plan, template and a real bash."""
    folder = tmp_path / "job"
    folder.mkdir(exist_ok=True)
    (folder / "dump.py").write_text(DUMP)
    asked = [Override("Launch.args", tuple(arguments), "--"), Override("Launch.entrypoint", "dump.py", "--")]
    asked += [Override(f"Launch.env.{name}", value, "--env", verbatim=True) for name in ("A", "B_2")]
    plan = plan_of(folder, "kind: local\n", [], JobIdentity("gpt-1", str(folder)), *asked)
    # Everything as planned, but the interpreter runs the script itself: torchrun would need seconds for each example.
    plan = plan._replace(work_dir=str(folder), form="standalone", program=(str(folder / "dump.py"), *arguments))
    text = render(plan, LAUNCH)
    command = text[text.index("/venv/bin/python") : text.index(" &\ntorchrun=$!")]
    bare = command.replace(command[: command.index(str(folder / "dump.py"))], f"{sys.executable} ", 1)
    meeting = {
        "GPTCTL_NODE": "0",
        "GPTCTL_ATTEMPT": "0",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "1",
        "OUT": str(folder / "out"),
    }
    result = subprocess.run(
        ["bash", "-c", text.replace(command, bare)], env={**os.environ, **meeting}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert json.loads((folder / "out").read_text()) == [arguments, {"A": value, "B_2": value}]
    assert not (folder / "hit").exists()


@pytest.mark.parametrize("value", ["a\nb", "a\tb", "\x1b[31m", "a\x00b", "\u202e", "\udc80"])
def test_control_characters_are_refused_with_the_place(value: str) -> None:
    asked = [Override("Launch.env.A", value, "--env A", verbatim=True)]
    if value not in ("a\nb", "a\tb"):  # a prompt may have them
        asked.append(Override("Launch.args", ("ok", value), "-- x"))
    for override in asked:
        checked = check_config(None, [Override("Launch.entrypoint", "x.py", "--"), override])
        assert not checked.is_valid
        assert str(checked.findings[0].place) == override.source


PYXIS_LAB = "kind: slurm\nrun_root: /data/runs\ngpus_per_node: 1\n"


@pytest.mark.parametrize(
    "image", ["$(touch hit)", "a b", "-x", "reg#img:1 --uid=0", "'\"`touch hit`", "é中文", "{{ x }}"]
)
def test_a_hostile_image_stays_one_word(tmp_path, image: str) -> None:
    """A stub of srun, run by bash from the printed script, writes down its words. No port of the address is in use."""
    profile = PYXIS_LAB + f"container: {json.dumps({'runtime': 'pyxis', 'image': image, 'pwd': '/b c'})}\n"
    plan = plan_of(tmp_path, profile, ["nodes=1"], IN_PLACE)
    stubs = {"srun": 'printf "%s\\0" "$@" > words', "scontrol": "echo node1", "getent": "echo 0.0.0.0"}
    for name, line in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "node1", "SLURM_JOB_ID": "1"}
    subprocess.run(["bash", "-c", render(plan, script_of("sbatch"))], cwd=tmp_path, env=env, check=True)
    words = (tmp_path / "words").read_text().split("\0")
    assert [word for word in words if word.startswith("--container-")] == [
        f"--container-image={image}",
        "--container-mounts=/home/me/work:/home/me/work",
        "--container-workdir=/b c",
        "--container-env=PYTHONUNBUFFERED,PYTHONFAULTHANDLER,TORCH_NCCL_ASYNC_ERROR_HANDLING,NCCL_DEBUG,"
        "OMP_NUM_THREADS,GPTCTL_LOG_DIR",
    ]
    assert not (tmp_path / "hit").exists()


def test_the_folder_and_the_logs_of_a_job_are_mounted(tmp_path) -> None:
    """The engine gives these options to srun; launch.sh, inside, writes to those folders."""
    profile = PYXIS_LAB + "container: {runtime: pyxis, image: /i.sqsh, binds: ['/d:/d:ro']}\n"
    plan = plan_of(tmp_path, profile, ["log_dir=/logs"], JOB)
    mounts = [f"{JOB.remote_dir}:{JOB.remote_dir}", "/logs/gpt-3f9a2c:/logs/gpt-3f9a2c", "/home/me/work:/home/me/work"]
    assert plan.srun_container == (
        "--container-image=/i.sqsh",
        f"--container-mounts=/d:/d:ro,{','.join(mounts)}",
    )
    assert plan.container == ()
    assert "--container" not in render(plan, LAUNCH)


@pytest.mark.parametrize(
    ("profile", "code", "words"),
    [
        (
            "kind: local\n{}container: {{runtime: pyxis, image: a}}\n",
            "P006",
            "kind local cannot run containers with pyxis",
        ),
        ("{}container: {{runtime: pyxis, image: a, binds: ['/a b:/c']}}\n", "P007", "/a b:/c is not a mount"),
        ("{}container: {{runtime: pyxis, image: a, binds: ['/a:/c,/d:/e']}}\n", "P007", "is not a mount"),
        ("{}container: {{runtime: pyxis, image: a, binds: ['/a:']}}\n", "P007", "is not a mount"),
        ("{}container: {{runtime: pyxis, image: gpt.sqsh}}\n", "P007", "in a registry"),
        ("{}container: {{runtime: pyxis, image: /gpt.sif}}\n", "P007", "Singularity or Apptainer"),
    ],
)
def test_what_pyxis_cannot_run_is_an_error_of_the_profile(tmp_path, profile: str, code: str, words: str) -> None:
    (tmp_path / "lab.yaml").write_text(profile.format("" if "kind" in profile else PYXIS_LAB))
    found = load_profile(str(tmp_path / "lab.yaml")).findings
    assert [(finding.code, finding.level) for finding in found] == [(code, "error")], found
    assert words in found[0].message
    assert found[0].hint


VARIABLES = [
    ("$MASTER_ADDR:29400", '--rdzv-endpoint="$MASTER_ADDR":29400'),
    ("${HEAD_NODE}:29400", '--rdzv-endpoint="${HEAD_NODE}":29400'),
    ("$MASTER_ADDR", '--rdzv-endpoint="$MASTER_ADDR":29400'),
]


@pytest.mark.parametrize(("endpoint", "word"), VARIABLES)
def test_a_variable_as_endpoint_is_left_to_the_shell(check, endpoint: str, word: str) -> None:
    launch = "Launch: {nodes: 2, gpus_per_node: 8, style: c10d, rdzv: {id: '100'}}\n"
    plan = planned(check(launch, f"Launch.rdzv.endpoint={endpoint}"), IN_PLACE)
    assert word in render(plan, "command.sh").split()


@pytest.mark.parametrize("endpoint", ["$(id)", "$A;id", "${A:-b}", "`id`", "$A$B:1", "a$B", '$A"', "$1:29400"])
def test_no_other_shell_code_is_an_endpoint(check, endpoint: str) -> None:
    findings = check("Launch: {nodes: 2, gpus_per_node: 1}\n", f"Launch.rdzv.endpoint='{endpoint}'").findings
    assert [finding.code for finding in findings] == ["C014"]


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    file.write_bytes(data)


def swap(file: Path, put: Callable[[Path], None]) -> None:
    file.unlink()
    put(file)


@pytest.mark.parametrize(
    "damage",
    [
        flip,
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(file.read_bytes()[:100]),
        # As jinja2's own cache wrote it, and what runs other code: without the digest in front.
        lambda file: file.write_bytes(file.read_bytes()[32:]),
        lambda file: os.truncate(file, 1 << 40),
        lambda file: swap(file, os.mkfifo),
        lambda file: swap(file, lambda name: name.symlink_to(name.name)),
        lambda file: swap(file, Path.mkdir),
    ],
)
def test_damaged_compiled_templates_are_compiled_again(
    tmp_path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None]
) -> None:
    """Oracle: the script from an empty cache. A test that opens the FIFO as jinja2 does would never end."""
    monkeypatch.setenv("GPTCTL_HOME", str(tmp_path / "home"))
    expected = script_text(tmp_path, "job")
    files = list((tmp_path / "home/compiled-templates-2").iterdir())
    assert files
    for file in files:
        damage(file)
    assert script_text(tmp_path, "job") == expected
    written = [file for file in files if file.is_file() and not file.is_symlink()]
    assert all(hashlib.sha256(file.read_bytes()[32:]).digest() == file.read_bytes()[:32] for file in written)
    assert len(written) == len(files) or all(file.is_dir() for file in files)


def test_compiled_templates_are_used(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPTCTL_HOME", str(tmp_path / "home"))
    expected = script_text(tmp_path, "job")
    monkeypatch.setattr("jinja2.Environment._compile", None)
    assert script_text(tmp_path, "job") == expected
