"""The rows of the doctor. Oracles: results worked out by hand; bash and shellcheck for the scripts."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

import pytest
import yaml

from gptctl.doctor import examine as examination
from gptctl.doctor.examine import DoctorRequest, examine
from gptctl.doctor.node_rows import (
    Arrival,
    EnginePython,
    ExpectedNode,
    NodeFacts,
    clock_row,
    duration,
    engine_row,
    failed_reduce_row,
    reduce_rows,
    rows_for_nodes,
)
from gptctl.doctor.probe import (
    BATCH_SCRIPT,
    ENGINE_SCRIPT,
    NODE_SCRIPT,
    ArrivalTracker,
    collect_rows,
    plan_probe,
    read_engines,
    read_nodes,
    temporary_folder,
    write_scripts,
)
from gptctl.doctor.rows import Row, merged, ok, tally, warning, wrong
from gptctl.doctor.signals import signals_blocked
from gptctl.doctor.slurm_checks import (
    SinfoLine,
    SlurmStatus,
    choose_partition,
    count_gpus,
    describe_partitions,
    gpu_row,
    parse_sinfo,
)
from gptctl.doctor.ssh_hosts import files_of, unpack
from gptctl.planning.build import Site
from gptctl.spec.cluster import Cluster
from tests.conftest import ROOT

SINFO = """\
main*|up|2|1-00:00:00|gpu:a100:4(S:0-1)|idle|1-infinite
main*|up|1|1-00:00:00|gpu:a100:4(S:0-1)|down*|1-infinite
cpu|up|8|infinite|(null)|mix|1-infinite
small|inact|1|10:00|gpu:2|idle|1
mixed|up|1|1:00|gpu:8|alloc|1-2
mixed|up|3|1:00|gpu:2|idle|1-2
"""
GROUPS = parse_sinfo(SINFO)
FACTS = {
    "host": "n1",
    "python": "/venv/bin/python",
    "version": "3.11.2",
    "interface": "eth0",
    "address": "10.0.0.1",
    "nccl": "=eth0",
    "interfaces": {"lo": "127.0.0.1", "eth0": "10.0.0.1", "ib0": "10.1.0.1", "ib1": ""},
    "own_name": ["10.0.0.1"],
    "head": "10.0.0.1",
    "free": 100 << 30,
    "cores": 8,
    "clock": 1000.0,
    "torch": "2.13.0+cu130",
    "numpy": "2.1.0",
    "gpus": ["A100", "A100"],
}
EXPECTED = ExpectedNode(gpus=2, ranks=2, has_peers=True)
NOW = Arrival(not_before=999.0, absent_at=1000.1, seen_at=1000.2)


def without(*keys: str) -> dict:
    return {key: value for key, value in FACTS.items() if key not in keys}


def not_ok(rows: list[Row]) -> list[tuple[str, str]]:
    return [(row.check, row.state) for row in rows if row.state != "ok"]


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("(null)", 0),
        ("gpu:4", 4),
        ("gpu:a100:4", 4),
        ("gpu:a100:4(S:0-1)", 4),
        ("gpu:a:1(S:0),gpu:b:2(S:1)", 3),
        ("nvme:9,gpu:2", 2),
        ("gpumem:80", 0),
        ("", 0),
    ],
)
def test_gpus_of_a_node(gres: str, gpus: int) -> None:
    assert count_gpus(gres) == gpus


def test_sinfo_is_read() -> None:
    assert [(group.partition, group.nodes, group.gpus, group.is_usable, group.max_nodes) for group in GROUPS] == [
        ("main", 2, 4, True, None),
        ("main", 1, 4, False, None),
        ("cpu", 8, 0, True, None),
        ("small", 1, 2, True, 1),
        ("mixed", 1, 8, True, 2),
        ("mixed", 3, 2, True, 2),
    ]
    assert [group.partition for group in GROUPS if group.is_default] == ["main", "main"]
    assert parse_sinfo("garbage\n") == []
    assert describe_partitions(GROUPS).startswith(
        "main* (3 nodes, 1-00:00:00), cpu (8 nodes, infinite), small (1 node, 10:00)"
    )


@pytest.mark.parametrize("state", ["down", "drain", "drng", "idle*", "down*", "fail", "maint", "unk"])
def test_nodes_in_these_states_run_nothing(state: str) -> None:
    assert not parse_sinfo(f"p|up|1|1:00|gpu:1|{state}|1")[0].is_usable


@pytest.mark.parametrize(
    ("name", "state", "words"),
    [
        (None, "warning", "main: up, nodes: 2 idle, 1 down*"),
        ("cpu", "ok", "time limit infinite"),
        ("small", "wrong", "not up"),
        ("mian", "wrong", "partition mian does not exist"),
    ],
)
def test_the_partition_of_the_profile(name: str | None, state: str, words: str) -> None:
    row = choose_partition(GROUPS, name)[1]
    assert row.state == state
    assert words in row.found
    assert name != "mian" or "did you mean main? known: main, cpu, small, mixed" in row.fix


def test_a_cluster_without_a_default_partition_or_without_able_nodes() -> None:
    assert "set partition" in choose_partition([group for group in GROUPS if not group.is_default], None)[1].fix
    assert "sinfo -R" in choose_partition([GROUPS[1]], "main")[1].fix


def test_how_many_nodes_and_gpus_a_job_can_have() -> None:
    main, small, mixed = (
        SlurmStatus((), tuple(choose_partition(GROUPS, name)[0])) for name in ("main", "small", "mixed")
    )
    assert (main.max_nodes, main.gpus(2)) == (2, 4)
    assert (small.max_nodes, small.gpus(1)) == (1, 2)
    assert (mixed.max_nodes, mixed.gpus(1), mixed.gpus(2)) == (2, 8, 2)
    assert (SlurmStatus(()).max_nodes, SlurmStatus(()).gpus(1)) == (0, 0)


@pytest.mark.parametrize(
    ("partition", "keys", "state", "fix"),
    [
        ("main", {"gpus_per_node": 4}, "ok", ""),
        ("main", {"gpus_per_node": 8}, "wrong", "gpus_per_node: 4"),
        ("main", {"gpus_per_node": 2}, "warning", "gpus_per_node: 4"),
        ("main", {}, "warning", "gpus_per_node: 4"),
        ("cpu", {"gpus_per_node": 4}, "wrong", "gpu_request: none"),
        ("cpu", {"gpus_per_node": 4, "gpu_request": "none"}, "ok", ""),
        ("mixed", {"gpus_per_node": 8}, "warning", "wait"),
    ],
)
def test_gpus_of_slurm_against_the_profile(partition: str, keys: dict, state: str, fix: str) -> None:
    row = gpu_row(choose_partition(GROUPS, partition)[0], Cluster(name="x", kind="slurm", **keys))
    assert row.state == state
    assert fix in row.fix
    if state == "wrong":
        assert f"gpus_per_node: {keys['gpus_per_node']}" in row.found, "both numbers are named"


def test_two_sound_nodes() -> None:
    rows = rows_for_nodes([NodeFacts("n1", FACTS, arrival=NOW), NodeFacts("n2", FACTS, arrival=NOW)], [], EXPECTED)
    assert not not_ok(rows)
    assert {row.node for row in rows} == {"n1", "n2", ""}
    assert [row.check for row in rows[-2:]] == ["same python", "same torch"]


def test_firewall_lines_need_all_hosts_of_the_profile() -> None:
    """Also those that --nodes leaves out. The first host is the first of the list, whoever answers."""
    facts = {**FACTS, "listens": ["::"], "head": "10.0.0.1"}
    first, second = NodeFacts("n1", facts), NodeFacts("n2", facts)
    silent = rows_for_nodes([first, NodeFacts("n2", failed="setup: no")], [], EXPECTED)
    left_out = rows_for_nodes([first, second], [], EXPECTED, ["n3"])
    assert [[row.found for row in rows if row.check == "firewall"] for rows in (silent, left_out)] == [
        ["no lines: the addresses of n2 are unknown"],
        ["no lines: the addresses of n3 are unknown"],
    ]
    stores = {row.node: row.found.split()[0] for row in left_out if row.check == "rendezvous"}
    assert stores == {"n1": "torch's", "n2": "no"}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"free": 5 << 30}, ("free space", "warning")),
        ({"free": 1 << 20}, ("free space", "wrong")),
        ({"version": "3.9.2"}, ("python", "wrong")),
        ({"torch": "2.4.1"}, ("torch", "warning")),
        ({"gpus": ["A100"]}, ("GPUs", "wrong")),
        ({"gpus": []}, ("GPUs", "wrong")),
        ({"cores": 1}, ("cores", "warning")),
        ({"interface": "", "address": ""}, ("network", "wrong")),
        ({"address": ""}, ("network", "wrong")),
        ({"interface": "lo", "address": "127.0.0.1"}, ("network", "wrong")),
        ({"nccl": "eth9"}, ("NCCL network", "wrong")),
        ({"nccl": "=ib"}, ("NCCL network", "wrong")),
        ({"nccl": "^eth,ib,lo"}, ("NCCL network", "wrong")),
        ({"nccl": "lo"}, ("NCCL network", "wrong")),
        ({"nccl": "ib1"}, ("NCCL network", "warning")),
        ({"own_name": []}, ("host name", "warning")),
        ({"own_name": ["127.0.1.1", "::1"]}, ("host name", "warning")),
        ({"error": "ModuleNotFoundError: No module named 'torch'"}, ("torch", "wrong")),
        ({"clock": 1063.0}, ("clock", "wrong")),
    ],
)
def test_one_thing_that_is_not_right(changed: dict, expected: tuple[str, str]) -> None:
    """Each gives one row with a fix, and no other row suffers from it."""
    rows = rows_for_nodes([NodeFacts("n1", {**FACTS, **changed}, arrival=NOW)], [], EXPECTED)
    assert not_ok(rows) == [expected]
    assert all(row.fix for row in rows if row.state != "ok")


@pytest.mark.parametrize(
    ("nccl", "found"),
    [("ib", "ib0 10.1.0.1"), ("^lo,ib", "eth0 10.0.0.1"), ("lo", "lo 127.0.0.1"), ("eth7", None), ("", "no row")],
)
def test_the_interface_of_nccl_matters_on_one_machine_too(nccl: str, found: str | None) -> None:
    """Whatever Gloo uses; the loopback interface is right there. Oracle: NCCL's own syntax."""
    facts = {**FACTS, "nccl": nccl, "interface": "lo", "address": "127.0.0.1"}
    rows = rows_for_nodes([NodeFacts("n1", facts)], [], ExpectedNode(2, 2, has_peers=False))
    row = next((row for row in rows if row.check == "NCCL network"), None)
    assert (row.found if row and row.state == "ok" else None if row else "no row") == found
    assert found or "this host has lo, eth0, ib0, ib1" in row.fix


def test_a_node_that_told_nothing_little_or_something_else() -> None:
    nodes = [
        NodeFacts("n0", no_access="/runs does not exist"),
        NodeFacts("n1", failed="setup: setup failed: module load x", last_line="module: not found"),
        NodeFacts("n2", failed="python: /nowhere does not exist"),
        NodeFacts("n3", last_line="Killed"),
        NodeFacts("n4", without("torch", "numpy", "gpus")),
        NodeFacts("n5", {**FACTS, "version": "3.12.1"}),
        NodeFacts("n6", FACTS),
    ]
    rows = {(row.node, row.check): row for row in rows_for_nodes(nodes, [], EXPECTED) if row.state == "wrong"}
    assert list(rows)[-1] == ("", "same python")
    assert rows["", "same python"].found == "3.11.2 on n4, n6; 3.12.1 on n5"
    assert rows["n0", "run_root"].found == "/runs does not exist"
    assert rows["n1", "setup"].found == "setup failed: module load x; module: not found"
    assert rows["n2", "python"].found == "/nowhere does not exist"
    assert rows["n3", "node"].found == "it reported nothing; last line of its output: Killed"
    assert "importing torch did not finish" in rows["n4", "torch"].found


def test_gpus_that_nobody_promised_are_not_missed() -> None:
    rows = rows_for_nodes([NodeFacts("n1", {**FACTS, "gpus": []})], [], ExpectedNode(0, 2, has_peers=False))
    assert not not_ok(rows)
    assert not {"network", "host name", "clock"} & {row.check for row in rows}, "one machine alone"


@pytest.mark.parametrize(
    ("engine", "state", "found"),
    [
        (EnginePython("n1", "/usr/bin/python3", "3.10.0"), "ok", "3.10.0, /usr/bin/python3"),
        (EnginePython("n1", "/usr/bin/python3", "3.13.0rc1"), "ok", "3.13.0rc1, /usr/bin/python3"),
        (
            EnginePython("n1", "/usr/bin/python3", "3.9.18"),
            "wrong",
            "3.9.18, /usr/bin/python3: gptctl's engine needs Python 3.10 or newer",
        ),
        (EnginePython("n1", failed="/nowhere does not exist"), "wrong", "/nowhere does not exist"),
    ],
)
def test_the_python_of_the_engine(engine: EnginePython, state: str, found: str) -> None:
    """It has a row even if the node itself reported nothing."""
    row = engine_row(engine)
    assert (row.check, row.node, row.state, row.found) == ("engine python", "n1", state, found)
    assert row.fix == ("set engine_python in the profile" if state == "wrong" else "")
    assert row in rows_for_nodes([NodeFacts("n1", failed="setup: no")], [engine], EXPECTED)


@pytest.mark.parametrize(
    ("clock", "state", "words"),
    [
        (100.0, "ok", ""),
        (130.0, "ok", ""),  # written somewhere between
        (133.0, "warning", "3 s ahead"),
        (200.0, "wrong", "70 s ahead"),
        (97.0, "warning", "3 s behind"),
        (30.0, "wrong", "70 s behind"),
        (110.0, "warning", "or files take that long to arrive here"),
    ],
)
def test_a_clock_is_judged_by_what_is_certain(clock: float, state: str, words: str) -> None:
    late = Arrival(not_before=100.0, absent_at=100.0 if state == "ok" else 129.0, seen_at=130.0)
    row = clock_row("n", clock, late)
    assert row.state == state
    assert words in row.found


def test_an_all_reduce() -> None:
    """2 · 3/4 · 64 MiB in 0.1 s on the busiest link."""
    measured = {"world": 4, "backend": "nccl", "is_right": True, "bytes": 64 << 20, "seconds": 0.1, "smallest": 2e-5}
    reduced, clocks = reduce_rows({**measured, "clocks": [[0, 5.0], [0, 5.0], [1, 5.25]]}, ["a", "b"])
    assert reduced.state == clocks.state == "ok"
    assert "1.01 GB/s over 4 ranks with nccl (64 MiB in 100 ms), latency 20 µs" in reduced.found
    assert clocks.found == "within 250 ms"
    assert reduce_rows({**measured, "clocks": [[0, 5.0], [1, 75.0]]}, ["a", "b"])[1][2:4] == (
        "wrong",
        "b is 70 s ahead of a",
    )
    assert reduce_rows({**measured, "is_right": False, "clocks": []}, [])[0].state == "wrong"
    assert failed_reduce_row("rank 1: no", True).found == "rank 1: no"
    assert failed_reduce_row("", False).state == "notice"
    assert [duration(seconds) for seconds in (2, 0.25, 2e-3, 2e-5)] == ["2.0 s", "250 ms", "2 ms", "20 µs"]


def test_rows_of_the_same_finding_are_one_line() -> None:
    rows = [ok("a", "x", f"n{number}") for number in range(6)] + [wrong("a", "y", "z", "n6"), warning("b", "", "z")]
    assert [(row.check, row.node) for row in merged(rows)] == [("a", "n0, n1, n2, … (6 nodes)"), ("a", "n6"), ("b", "")]
    assert tally(rows) == "1 problem, 1 warning"
    assert tally(rows[:2]) == "no problems"


SITE = Site("/home/me/it's $(mine)", sys.executable, str(ROOT / "trainer"))
PROFILE = """\
kind: slurm
gpus_per_node: 2
partition: a800
python: "/opt/py 3/$(boom)"
run_root: /x
setup: ["true"]
container: {image: "/i $(boom).sif"}
sbatch: {qos: high, mail-type: ALL}
"""


def test_the_scripts_are_quoted_and_bash_reads_them(tmp_path: Path) -> None:
    """Oracles: `bash -n`, and where it is installed shellcheck."""
    (tmp_path / "lab.yaml").write_text(PROFILE)
    folder = tmp_path / "a b'c$(boom)"
    folder.mkdir()
    plan = plan_probe(str(tmp_path / "lab.yaml"), None, SITE, folder, 2, 2, "gpu")
    assert plan.sbatch["gres"] == "gpu:2"
    assert plan.sbatch["qos"] == "high"
    assert (plan.sbatch["time"], plan.sbatch["output"]) == ("5", "/dev/null")
    assert not [name for name in plan.sbatch if name.startswith("mail") or name == "signal"]
    write_scripts(folder, plan, SITE, BATCH_SCRIPT, ENGINE_SCRIPT)
    assert (folder / "code" / "trainer" / "node_check.py").stat().st_mode & 0o777 == 0o600
    for name in (NODE_SCRIPT, BATCH_SCRIPT, ENGINE_SCRIPT):
        assert subprocess.run(["bash", "-n", str(folder / name)]).returncode == 0
        if shutil.which("shellcheck"):
            command = ["shellcheck", "--severity=style", "--exclude=SC2016", str(folder / name)]  # $ is quoted
            found = subprocess.run(command, capture_output=True, text=True)
            assert found.returncode == 0, found.stdout


def write_python(file: Path, body: str) -> Path:
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)
    return file


@pytest.mark.parametrize("case", ["engine_python", "wrong engine_python", "submit", "setup", "old"])
def test_the_choice_of_an_engine_python_on_slurm(tmp_path: Path, case: str) -> None:
    """The script is run by bash. Oracle: which of the interpreters were put there."""
    real = write_python(tmp_path / "real" / "python3", f'exec {sys.executable} "$@"')
    old = write_python(tmp_path / "old" / "python3", "exit 1")
    keys = {
        "engine_python": f"engine_python: {real}",
        "wrong engine_python": "engine_python: /nowhere/python3",
        "submit": "setup: [exit 1]",
        "setup": f"setup: ['export PATH={real.parent}:$PATH']",
        "old": f"setup: ['export PATH={old.parent}:$PATH']",
    }
    (tmp_path / "lab.yaml").write_text(f"kind: slurm\ngpus_per_node: 1\nrun_root: /x\n{keys[case]}\n")
    submitted_with = str(real) if case == "submit" else "/nowhere/submit"
    site = SITE._replace(python=submitted_with)
    plan = plan_probe(str(tmp_path / "lab.yaml"), None, site, tmp_path, 1, 1, "cpu")
    write_scripts(tmp_path, plan, site, ENGINE_SCRIPT)
    subprocess.run(["bash", str(tmp_path / ENGINE_SCRIPT)])
    [engine] = read_engines(tmp_path, ["n1", "n2"])
    row = engine_row(engine)
    if "wrong" not in case and case != "old":
        assert (row.state, row.found) == ("ok", f"{sys.version.split()[0]}, {real}")
        return
    assert row.state == "wrong"
    for word in ("engine_python of profile lab", "/nowhere/submit", "python3 after the setup"):
        assert word in row.found


@pytest.mark.parametrize(
    ("keys", "state", "found"),
    [
        ("engine_python: {real}", "ok", "{version}, {real}"),
        ("engine_python: /nowhere/python", "wrong", "/nowhere/python does not exist"),
        ("python: {broken}", "wrong", "{broken} does not start"),
        ("python: {old}", "wrong", "3.8.1, {old}: gptctl's engine needs Python 3.10 or newer"),
        ("{{container: {{image: /i.sif}}, setup: ['PATH={folder}/real:$PATH']}}", "ok", "{version}, {real}"),
    ],
)
def test_the_engine_python_of_an_ssh_host(tmp_path: Path, keys: str, state: str, found: str) -> None:
    """The script of a host is run by bash; the ranks have no Python there, so that it exits at once."""
    words = {
        "real": str(write_python(tmp_path / "real" / "python3", f'exec {sys.executable} "$@"')),
        "old": str(write_python(tmp_path / "old" / "python3", '[ "$1" = -S ] && echo 3.8.1')),
        "broken": str(write_python(tmp_path / "broken" / "python3", "exit 1")),
        "version": sys.version.split()[0],
        "folder": str(tmp_path),
    }
    profile = {"kind": "ssh", "gpus_per_node": 1, "hosts": ["n1"], "run_root": "/x", "python": "/nowhere"}
    profile |= yaml.safe_load(keys.format(**words))
    (tmp_path / "hosts.yaml").write_text(yaml.safe_dump(profile))
    site = SITE._replace(folder=str(tmp_path))
    plan = plan_probe(str(tmp_path / "hosts.yaml"), None, site, tmp_path, 1, 1, "cpu")
    write_scripts(tmp_path, plan, site)
    variables = {"GPTCTL_NODE": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    subprocess.run(["bash", str(tmp_path / NODE_SCRIPT), "facts"], env={**os.environ, **variables})
    row = engine_row(*read_engines(tmp_path, ["n1"]))
    assert (row.state, row.found) == (state, found.format(**words))


def test_a_kind_that_the_doctor_does_not_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fourth backend: its profile is checked, and a notice says that nothing else is."""
    monkeypatch.setattr(examination, "EXAMINATIONS", {})
    (tmp_path / "toy.yaml").write_text("kind: local\n")
    report = examine(DoctorRequest(str(tmp_path / "toy.yaml"), 7, 1.0, SITE, print))
    assert [(row.check, row.state) for row in report.rows] == [("profile", "ok"), ("nodes", "notice")]
    assert report.rows[1].found == "not checked: gptctl has no checks for nodes of kind local"
    assert report.rows[1].fix
    assert report.exit_code == 0
    (tmp_path / "toy.yaml").write_text("kind: local\npartiton: x\n")
    report = examine(DoctorRequest(str(tmp_path / "toy.yaml"), None, 1.0, SITE, print))
    assert {row.check for row in report.rows} == {"profile"}
    assert report.exit_code == 1


def test_a_folder_leaves_nothing_even_above_it(tmp_path: Path) -> None:
    with temporary_folder(tmp_path / "a" / "b") as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "file").touch()
    assert not list(tmp_path.iterdir())
    (tmp_path / "kept").mkdir()
    with temporary_folder(tmp_path / "kept"):
        pass
    assert [entry.name for entry in tmp_path.iterdir()] == ["kept"]


def test_what_nodes_leave_is_read(tmp_path: Path) -> None:
    tracker = ArrivalTracker(tmp_path, 2)
    tracker.poll()
    (tmp_path / "node.0.json").write_text('{"version": "3.11.2"}')
    tracker.poll()
    (tmp_path / "no_access").write_text("1 n2 does not exist\n")
    (tmp_path / "node.0.log").write_text("one\ntwo\n\n")
    first, second = read_nodes(tmp_path, ["n1", "n2"], tracker)
    assert first.facts == {"version": "3.11.2"}
    assert first.last_line == "two"
    assert first.arrival
    assert first.arrival.not_before <= first.arrival.absent_at <= first.arrival.seen_at
    assert second.facts is None
    assert second.no_access == f"{tmp_path.parent} does not exist"


def test_the_rank_that_failed_first_is_named(tmp_path: Path) -> None:
    facts = str(FACTS).replace("'", '"')
    (tmp_path / "node.0.json").write_text(facts)
    for number, name in enumerate(("node.0.rank.1.failed", "node.0.rank.0.failed")):
        (tmp_path / name).write_text(f"no way {name}")
        os.utime(tmp_path / name, (number, number))
    row = collect_rows(tmp_path, ["n1"], ArrivalTracker(tmp_path, 1), EXPECTED)[-1]
    assert (row.check, row.state, row.found) == ("all-reduce", "wrong", "rank 1: no way node.0.rank.1.failed")


def test_a_host_writes_only_its_own_files(tmp_path: Path) -> None:
    """Not the facts of another host, not what rank 0 measures, and nothing elsewhere."""
    names = [
        "node.0.json",
        "node.1.json",
        "node.1.rank.2.failed",
        "node.10.json",
        "reduce.json",
        "hosts",
        "node.1.json\n",
    ]
    names += ["../node.1.json", "/tmp/node.1.json", "node.1./../../x", "node.1." + "x" * 300]
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:") as entries:
        for name in names:
            entry = tarfile.TarInfo(name)
            entry.size = 1
            entries.addfile(entry, io.BytesIO(b"x"))
    folder = tmp_path / "copy"
    folder.mkdir()
    unpack(archive.getvalue(), folder, files_of(1))
    assert sorted(file.name for file in folder.iterdir()) == ["node.1.json", "node.1.rank.2.failed"]
    assert list(tmp_path.iterdir()) == [folder]
    unpack(archive.getvalue(), folder, files_of(0))
    assert {file.name for file in folder.iterdir()} >= {"node.0.json", "reduce.json"}


def test_signals_wait_also_for_children() -> None:
    heard = []

    def interrupted() -> None:
        with signals_blocked():
            signal.raise_signal(signal.SIGINT)
            child = subprocess.run(["bash", "-c", "kill -INT $$; kill -TERM $$; echo lives"], capture_output=True)
            heard.append(child.stdout)
        heard.append(b"not reached")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert heard == [b"lives\n"]


def test_signals_wait_that_another_thread_receives() -> None:
    """As with ssh connections, whose threads do not block signals."""
    stopped, steps = threading.Event(), []
    other = threading.Thread(target=stopped.wait)
    other.start()

    def interrupted() -> None:
        with signals_blocked():
            signal.pthread_kill(other.ident or 0, signal.SIGINT)
            time.sleep(0.2)
            steps.append("cleaned up")
        steps.append("not reached")

    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
    finally:
        stopped.set()
        other.join()
    assert steps == ["cleaned up"]


def test_other_nodes_of_a_partition_get_no_firewall_lines_against_them() -> None:
    """Lines for two of three nodes would lock out the third, on which jobs run, too."""
    line = SinfoLine("main", True, True, 3, "1:00:00", 0, "idle", None)
    status = SlurmStatus((), (line,))
    assert (status.others(2), status.others(3)) == (["1 other node of the partition"], [])
