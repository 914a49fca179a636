"""Tasks on ssh hosts without a shared disk. Oracle: the same task here, on a copy of the checkpoint."""

from __future__ import annotations

import json
import re

import pytest

from tests.integration.ssh.desk import Desk

TEXT = "the quick brown fox jumps over the lazy dog " * 20
CPU = ("-o", "Global.device=cpu")


@pytest.mark.long
def test_a_checkpoint_is_used_where_it_is(desk: Desk) -> None:
    words = desk.train("--nodes", "1", "--gpus-per-node", "2", "--wait", keys=("Engine.max_steps=4",))
    job = desk.json(*words)["job"]
    desk.on("ssh1", f"printf '%s' '{TEXT}' > /home/gpt/fox.txt")

    done = desk.run("eval", job, "/home/gpt/fox.txt", *CPU)
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"the checkpoint of {job} is not on this machine" in done.stderr
    assert f"gptctl fetch {job} --checkpoints; or run there: --cluster hosts" in done.stderr

    there = ("--cluster", "hosts", *CPU)
    halves = ("--gpus-per-node", "2", "-o", "Distributed.mp_degree=2")
    done = desk.run("eval", job, "/home/gpt/fox.txt", *there, *halves)
    assert done.returncode == 0, done.stdout + done.stderr
    (measured,) = re.findall(r"^\[rank 0\] ppl +([0-9.]+)$", done.stdout, re.MULTILINE)

    greedy = ("--greedy", "--max-length", "8")
    done = desk.run("generate", job, "the quick", *greedy, *there)
    assert done.returncode == 0, done.stdout + done.stderr
    written = re.findall(r"^\[rank 0\] (the quick.*)$", done.stdout, re.MULTILINE)

    done = desk.run("export", job, "--output", "/home/gpt/exported", *there)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "model.safetensors" in desk.on("ssh1", "ls /home/gpt/exported")

    assert desk.run("fetch", job, "--checkpoints").returncode == 0
    rows = [row for row in desk.json("logs", job, "--metrics") if "eval_ppl:fox.txt" in row]
    assert [row["step"] for row in rows] == [4]  # brought home with the checkpoint
    (desk.folder / "fox.txt").write_text(TEXT)
    done = desk.run("eval", job, "fox.txt", *CPU, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["ppl"] == pytest.approx(float(measured), rel=1e-5)
    done = desk.run("generate", job, "the quick", *greedy, *CPU)
    assert [line.rstrip() for line in done.stdout.splitlines()] == [line.rstrip() for line in written]


@pytest.mark.long
def test_data_is_prepared_on_a_host(desk: Desk) -> None:
    """Both verbs, one after the other, on one host. Oracle: the same files, prepared here."""
    one = ("--cluster", "hosts")
    text = "\n\n".join(f"{number}: {TEXT}" for number in range(60))
    desk.on("ssh1", f"mkdir /home/gpt/books && printf '%s' '{text}' > /home/gpt/books/fox.txt")
    (desk.folder / "books").mkdir()
    (desk.folder / "books/fox.txt").write_text(text)
    desk.lab.run("head", "chown", "-R", "gpt", str(desk.folder), check=True)
    for books, folder, where in (("/home/gpt/books", "/home/gpt", one), ("books", ".", ())):
        words = ("--output", f"{folder}/tokenizer", "--vocab-size", "300")
        done = desk.run("data", "train-tokenizer", books, *words, *where)
        assert done.returncode == 0, done.stdout + done.stderr
        words = ("--output", f"{folder}/ids/fox", "--tokenizer", f"{folder}/tokenizer", "--documents", "paragraph")
        done = desk.run("data", "prepare", books, *words, *where)
        assert done.returncode == 0, done.stdout + done.stderr
    sums = "cd {0}/ids && sha256sum fox* tokenizer/*"
    assert desk.on("ssh1", sums.format("/home/gpt")) == desk.on("head", sums.format(desk.folder))
    assert desk.on("ssh1", "ls /home/gpt/ids").split() == ["fox_ids.npy", "fox_idx.npz", "fox_meta.json", "tokenizer"]
