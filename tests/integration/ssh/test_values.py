"""What arrives in the ranks over ssh: any string as it was, secrets where nobody else finds them, commands for pasting."""

from __future__ import annotations

import base64
import json
import re
import secrets
import shlex
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.integration.ssh.desk import ADDRESSES, HOSTS, Desk

UNSHRUNK = (Phase.explicit, Phase.generate)  # an example takes seconds
TRAINING = """
import gc
import os
import torch
import torch.distributed as dist
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
if world > 1:
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
x = torch.arange(32.0).view(8, 4).sin()
y = x.sum(1, keepdim=True)
for _ in range(5):
    optimizer.zero_grad()
    ((model(x[rank::world]) - y[rank::world]) ** 2).mean().backward()
    optimizer.step()
print(rank, "of", world, "loss", f"{((model(x) - y) ** 2).mean().item():.5f}")
if world > 1:
    dist.barrier()  # without it, the end of the other rank may end this one
    del model, optimizer
    gc.collect()  # if DDP outlives the process group, torch may abort at exit
    dist.destroy_process_group()
"""
HOSTILE = st.text(st.characters(codec="utf-8").filter(str.isprintable), max_size=40)


@pytest.mark.parametrize("examples", [2, pytest.param(100, marks=pytest.mark.long)])
def test_hostile_strings_arrive_unchanged(desk: Desk, examples: int) -> None:
    """Arguments, environment and the name of the folder; nothing is executed anywhere."""
    canary = f"/tmp/canary-{secrets.token_hex(4)}"
    numbers = iter(range(10**6))

    @settings(
        max_examples=examples, suppress_health_check=list(HealthCheck), derandomize=True, deadline=None, phases=UNSHRUNK
    )
    @given(HOSTILE, HOSTILE)
    def check(value: str, argument: str) -> None:
        root = f"{desk.run_root}/{next(numbers)} '{argument.replace('/', '_')[:20]}\"$(touch {canary})"
        desk.write_profile("quick", python=str(desk.stand_in), run_root=root)
        words = [f"{value};touch {canary}", f"{argument}`touch {canary}`"]
        done = desk.run(*desk.quick("--json", V=words[0]), words[1])
        assert done.returncode == 0, done.stderr
        job = json.loads(done.stdout)
        desk.wait(job["job"], "COMPLETED")
        quoted = shlex.quote(root)
        for host in HOSTS:
            arrived = base64.b64decode(desk.on(host, f"base64 {quoted}/*/words"))
            assert arrived.decode().split("\0") == words

    check()
    for host in ("head", *HOSTS):
        assert desk.on(host, f"ls {canary}") == ""


ENVIRONMENT = """
import os, torch.distributed as dist
dist.init_process_group("gloo")
names = ("NCCL_A", "NCCL_B", "NCCL_C", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "RANK", "WORLD_SIZE")
print("has", *(os.environ.get(name) for name in names), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("form", [pytest.param("static", marks=pytest.mark.long), "c10d"])
def test_the_environment_of_every_rank(desk: Desk, form: str) -> None:
    """Flag over config over profile, and the interface to the first host, whichever way the ranks meet."""
    (desk.folder / "job.py").write_text(ENVIRONMENT)
    hosts = [{"host": "ssh1", "address": ADDRESSES["ssh1"]}, {"host": "private1", "proxy_jump": "bastion"}]
    desk.write_profile("hosts", hosts=hosts, env={"NCCL_A": "profile", "NCCL_B": "profile", "NCCL_C": "profile"})
    keys = ["-o", "Launch.env={NCCL_B: config, NCCL_C: config}", "-o", f"Launch.rdzv.backend={form}"]
    asked = ["submit", "--cluster", "hosts", "--nodes", "2", "--gpus-per-node", "1", *keys, "--env", "NCCL_C=flag"]
    done = desk.run(*asked, "--follow", "--", "job.py")
    assert done.returncode == 0, done.stdout + done.stderr
    said = sorted(line for line in done.stdout.splitlines() if "] has " in line)
    interfaces = ["eth1", "eth0"]  # of the network on which both are
    if form == "c10d":  # which sorts the hosts by their addresses, as text
        interfaces.reverse()
    for rank, interface in enumerate(interfaces):
        assert said[rank] == f"[rank {rank}] has profile config flag {interface} ={interface} {rank} 2"


def test_secrets_are_nowhere_to_be_found(desk: Desk) -> None:
    """One from the environment of gptctl, one from a file on each host: the key of checkpoints, as users name it."""
    from_env, from_file = secrets.token_hex(16), secrets.token_hex(16)
    for host in HOSTS:
        desk.on(host, f"umask 077; echo {from_file} > ~/token")
    script = "import os, subprocess\nprint('has', len(os.environ['A']), len(os.environ['GPTCTL_CHECKPOINT_KEY']), flush=True)\n"
    script += "print(subprocess.run(['ps', 'axww', '-o', 'args'], capture_output=True, text=True).stdout)\n"
    (desk.folder / "talk.py").write_text(script)
    keys = ["-o", "Launch.secrets.A.env=MY_TOKEN"]
    keys += ["-o", "Launch.secrets.GPTCTL_CHECKPOINT_KEY.file=/home/gpt/token"]
    asked = ["submit", "--cluster", "hosts", "--nodes", "2", "--gpus-per-node", "1", *keys, "--follow", "--", "talk.py"]
    done = desk.run(*asked, MY_TOKEN=from_env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("has 32 32") == 2
    assert from_env not in done.stdout + done.stderr
    assert from_file not in done.stdout + done.stderr
    for host in ("head", *HOSTS):
        places = f"/home/gpt {desk.folder} {desk.lab.folder}/tmp"
        found = desk.on(host, f"grep -rlF -e {from_env} -e {from_file} {places} 2> /dev/null").split()
        assert found == (["/home/gpt/token"] if host != "head" else [])


@pytest.mark.long
def test_a_module_and_its_files_reach_hosts_that_share_nothing(desk: Desk) -> None:
    """A package of the user, a module beside it that it imports, and a package that only `Launch.files` names."""
    for file, text in {
        "pack/__init__.py": "",
        "pack/train.py": "import importlib, beside, sys\nfound = importlib.import_module('more.part')\n"
        "print('has', beside.A, found.B, sys.argv[1:], __file__.startswith('/home/gpt/'), flush=True)\n",
        "beside.py": "A = 1",
        "elsewhere/more/part.py": "B = 2",
    }.items():
        (desk.folder / file).parent.mkdir(parents=True, exist_ok=True)
        (desk.folder / file).write_text(text)
    asked = ["submit", "--cluster", "hosts", "--nodes", "2", "--gpus-per-node", "1", "--follow"]
    done = desk.run(*asked, "-o", "Launch.files=[elsewhere/more]", "--", "-m", "pack.train", "a b")
    assert done.returncode == 0, done.stdout + done.stderr
    said = sorted(line for line in done.stdout.splitlines() if "] has " in line)
    assert said == [f"[rank {rank}] has 1 2 ['a b'] True" for rank in (0, 1)]


def test_the_two_commands_of_the_tutorial(desk: Desk) -> None:
    """`render --style static` prints one for each host; pasted by hand they train as one process does."""
    file = desk.lab.folder / "tmp" / f"train-{desk.folder.name}.py"
    file.write_text(TRAINING)
    alone = desk.lab.run("head", sys.executable, str(file), user="gpt", check=True).stdout
    asked = ["render", "--style", "static", "--cluster", "hosts", "--nodes", "2", "--gpus-per-node", "1"]
    printed = [desk.run(*asked, "--node", str(node), "--", str(file)).stdout for node in range(2)]
    assert f"--master-addr={ADDRESSES['ssh1']}" in printed[1]
    assert re.search(r"--node-rank=1\b", printed[1])
    running = [
        desk.lab.start(host, "bash", "-c", text, user="gpt", stdout=subprocess.PIPE)
        for host, text in zip(HOSTS, printed)
    ]
    said = [process.communicate(timeout=60)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert said == [alone.replace("0 of 1", f"{rank} of 2") for rank in range(2)]
