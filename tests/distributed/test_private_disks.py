"""Nodes that see no common folder: each keeps whole checkpoints. Oracle: the same layout on one disk, bit for bit."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

from tests.distributed.test_resume import assert_equal
from tests.ranks import Ended, Ranks, fork, free_port, run, tiny
from trainer.__main__ import main

PER_NODE = 2
LAYOUT = ("Distributed.mp_degree=2",)


class Nodes(Ranks):
    """Two nodes with a folder each, in which their ranks run."""

    def __init__(self, folders: list[Path], *arguments: str) -> None:
        self.folder = folders[0]
        world = PER_NODE * len(folders)
        self.logs = [(folders[0].parent / f"out.{rank}", folders[0].parent / f"err.{rank}") for rank in range(world)]
        common = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(PER_NODE), "MASTER_ADDR": "127.0.0.1"}
        common |= {"MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo", "GPTCTL_PRIVATE_DISKS": "1"}
        self.pids, self.codes = [], {}
        for rank in range(world):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank % PER_NODE), "GROUP_RANK": str(rank // PER_NODE)}
            first = rank // PER_NODE * PER_NODE
            own["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(first, first + PER_NODE)))  # for tests/gpu
            folder = folders[rank // PER_NODE]
            folder.mkdir(parents=True, exist_ok=True)
            self.pids.append(fork(partial(main, list(arguments)), folder, {**common, **own}, *self.logs[rank]))


def train(folders: list[Path], *arguments: str, **keys: object) -> Ended:
    return Nodes(folders, *tiny(**keys), *arguments).wait()


def test_each_node_can_go_on_with_what_it_has(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    whole = run(tmp_path / "whole", *tiny(max_steps=8), *LAYOUT, world=4)
    half = train(folders, *LAYOUT, max_steps=4)
    rest = train(folders, *LAYOUT, max_steps=8, ckpt_dir="auto")
    assert whole.ok, whole.text
    assert half.ok, half.text
    assert rest.ok, rest.text
    assert rest.metrics() == whole.metrics()
    for folder in folders:
        assert_equal(folder / "output" / "step_8", tmp_path / "whole" / "output" / "step_8")
    assert (folders[0] / "output" / "metrics.jsonl").exists()


def test_a_checkpoint_that_one_node_has_lost_is_of_no_use(tmp_path: Path) -> None:
    """It goes on from one that all have; where there is none, somebody has to decide; nothing is deleted."""
    folders = [tmp_path / "a", tmp_path / "b"]
    assert train(folders, *LAYOUT, max_steps=4, save_steps=2).ok
    shutil.rmtree(folders[1] / "output" / "step_4")
    rest = train(folders, *LAYOUT, max_steps=6, ckpt_dir="auto")
    assert rest.ok, rest.text
    assert "step_2" in rest.text
    shutil.rmtree(folders[1] / "output")
    refused = train(folders, *LAYOUT, max_steps=8, ckpt_dir="auto")
    assert refused.codes[0] == 93, refused.text
    assert "checkpoints in output are missing on these nodes, but not on others: 1" in refused.text
    assert len(list((folders[0] / "output").glob("step_*"))) > 1


def test_a_first_save_that_was_torn_is_no_checkpoint(tmp_path: Path) -> None:
    """One node had its whole copy, the other not yet: the run begins anew by itself."""
    folders = [tmp_path / "a", tmp_path / "b"]
    assert train(folders, *LAYOUT, max_steps=2).ok
    shutil.rmtree(folders[1] / "output")
    anew = train(folders, *LAYOUT, max_steps=4, ckpt_dir="auto")
    assert anew.ok, anew.text
    assert "is not on the disks of all nodes" in anew.text
    assert_equal(folders[0] / "output" / "step_4", folders[1] / "output" / "step_4")


def test_a_layout_that_would_tear_checkpoints_is_refused(tmp_path: Path) -> None:
    torn = train([tmp_path / "a", tmp_path / "b"], "Distributed.sharding.sharding_degree=4", max_steps=2, micro_batch=1)
    assert torn.codes[0] == 93, torn.text
    assert "a checkpoint would be split over several nodes" in torn.text


def test_a_checkpoint_of_another_run_on_one_node_is_not_mixed_in(tmp_path: Path) -> None:
    """Same name, same step, other weights: the replicas would differ from then on. Oracle: the run without it."""
    folders, others = [tmp_path / "a", tmp_path / "b"], [tmp_path / "c", tmp_path / "d"]
    for nodes, rate in ((folders, 1e-3), (others, 1e-1)):
        ended = train(nodes, *LAYOUT, max_steps=4, save_steps=2, max_lr=rate)
        assert ended.ok, ended.text
    shutil.rmtree(folders[1] / "output" / "step_4")
    shutil.copytree(others[1] / "output" / "step_4", folders[1] / "output" / "step_4")
    before = ended._replace(folder=folders[0]).metrics()
    rest = train(folders, *LAYOUT, max_steps=4, ckpt_dir="auto")
    assert rest.ok, rest.text
    assert "cannot use output/step_4: it is not the same checkpoint on all nodes" in rest.text
    assert rest.metrics()[-2:] == before[2:]
