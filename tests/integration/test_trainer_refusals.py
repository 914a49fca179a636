"""What the trainer refuses, and what it survives: bad input, foreign checkpoints, full and read-only disks."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.integration.test_trainer import train_lines
from tests.ranks import Ranks, run, tiny
from tests.unit.test_data import write_npz
from trainer.__main__ import main


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "5"}, "RANK=5 and LOCAL_WORLD_SIZE=1 contradict WORLD_SIZE=1"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2, but RANK is not set"),
        ({"RANK": "abc"}, "RANK=abc is invalid"),
    ],
)
def test_half_a_world_is_refused_at_once(tmp_path: Path, environ: dict[str, str], message: str) -> None:
    ended = run(tmp_path, *tiny(), **environ)
    assert ended.codes == [93]
    assert message in ended.err[0]
    assert "Traceback" not in ended.text


def refused(tmp_path: Path) -> Iterator[tuple[list[str], str, str]]:
    """Arguments, and what the message and the hint have to say."""
    data = tmp_path / "data"
    data.mkdir()
    tokens = {"dataset": "GPTDataset", "path": "", "vocab": 100, "input_dir": data}
    yield tiny(**tokens), "contains no token files", "_ids.npz"
    yield tiny(**{**tokens, "input_dir": tmp_path / "none"}), "no data at", "input_dir"
    write_npz(tmp_path / "big", [[1, 2, 300] * 20])
    yield (
        tiny(**{**tokens, "input_dir": tmp_path / "big_ids.npz"}),
        "token id 300 is outside the vocabulary of 100",
        "tokenizer",
    )
    np.savez(tmp_path / "sum_ids.npz", ids=np.arange(90, dtype=np.uint16), lens=np.array([80]))
    yield tiny(**{**tokens, "input_dir": tmp_path / "sum_ids.npz"}), "the sum of lens is 80, but ids has 90", "again"
    write_npz(tmp_path / "short", [[1, 2, 3]])
    yield (
        tiny(**{**tokens, "input_dir": tmp_path / "short_ids.npz"}),
        "has 3 tokens, but one sample needs 17",
        "max_seq_len",
    )
    (tmp_path / "a.txt").write_text("too short")
    yield tiny(path=tmp_path / "a.txt"), "has 9 characters, but one sample needs 17", "max_seq_len"
    yield tiny(path=tmp_path / "b.txt"), f"cannot read {tmp_path / 'b.txt'}: No such file", "path"
    yield tiny(path="s3://bucket/text"), "s3://", ""
    yield tiny(device="gpu"), "torch finds no GPU", "use -o Global.device=cpu"
    yield ["--device", "gpu", *tiny()[1:]], "torch finds no GPU", "use -o Global.device=cpu"
    yield tiny(vocab=10), "different characters", "empty"
    yield tiny(**{"Distributed.mp_degree": 2, "Distributed.dp_degree": 1}), "L001", "dp_degree"
    yield tiny(layers="many"), "Model.num_layers", ""
    yield ["-c", str(tmp_path / "none.yaml")], "none.yaml", ""
    yield tiny(output_dir=tmp_path / "a.txt"), "is a file", "output_dir"
    yield ["-c"], "-c needs a value", "--help"
    yield ["run.yaml"], "neither a flag nor KEY=VALUE", "--help"
    yield tiny(ckpt_dir=tmp_path / "none"), "contains no usable checkpoint", "ckpt_dir"
    yield tiny(output_dir=tmp_path / "a.txt" / "output"), "cannot write to", "output_dir"
    yield tiny(**{"Nonsense.key": 1}), "C010", ""


def test_bad_input_is_one_clear_message(tmp_path: Path) -> None:
    for number, (arguments, message, hint) in enumerate(refused(tmp_path)):
        ended = run(tmp_path / f"case{number}", *arguments)
        assert ended.codes == [93], (message, ended.text)
        assert message in ended.err[0], ended.text
        assert hint in ended.err[0], ended.text
        assert "Traceback" not in ended.text, ended.text


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    run(tmp_path, *tiny(max_steps=2))
    text = tmp_path / "text.txt"
    text.write_text("".join(map(chr, range(40, 136))) * 50)  # as many characters as the demo corpus has, but others
    for change, message in (
        ({"hidden": 64}, "hidden_size is 32 there, 64 here"),
        ({"heads": 4}, "num_attention_heads is 2 there, 4 here"),
        ({"layers": 3}, "num_layers is 2 there, 3 here"),
        ({"path": text}, "its vocabulary has different characters"),
    ):
        ended = run(tmp_path, *tiny(max_steps=4, ckpt_dir="auto", **change))
        assert ended.codes == [93]
        assert f"is a checkpoint of another model: {message}" in ended.err[0]
        assert "Traceback" not in ended.text
    assert run(tmp_path, *tiny(max_steps=4, ckpt_dir="auto")).ok


def test_a_full_disk_costs_no_step(tmp_path: Path, small_disk: Path) -> None:
    """Room for one checkpoint: training goes on to the end, the first one stays, and the end says what is missing."""
    ended = run(tmp_path, *tiny(save_steps=4, output_dir=small_disk / "output"))
    assert ended.codes == [93]
    assert [line.step for line in train_lines(ended.out[0])] == list(range(1, 11))
    assert [folder.name for folder in (small_disk / "output").glob("step_*")] == ["step_4"]
    assert re.search(r"cannot save checkpoint of step 8: .*; earlier ones are kept", ended.out[0])
    assert "error: cannot save the last checkpoint: " in ended.err[0]
    assert "Traceback" not in ended.text
    subprocess.run(["mount", "-o", "remount,size=20m", str(small_disk)], check=True)
    rest = run(tmp_path, *tiny(output_dir=small_disk / "output", ckpt_dir="auto"))
    assert rest.ok, rest.text
    assert train_lines(rest.out[0])[0].step == 5


def test_a_disk_that_is_full_from_the_start(tmp_path: Path, small_disk: Path) -> None:
    """Not even the lock file can say whose it is: the run trains, and ends with what is missing."""
    (small_disk / "filler").write_bytes(bytes(690 * 1024))
    with contextlib.suppress(OSError), open(small_disk / "more", "wb", buffering=0) as stream:
        while stream.write(bytes(4096)):
            pass
    ended = run(tmp_path, *tiny(max_steps=3, output_dir=small_disk / "output"))
    assert ended.codes == [93]
    assert len(train_lines(ended.out[0])) == 3
    assert "error: cannot save the last checkpoint" in ended.err[0]
    assert "Traceback" not in ended.text


def test_a_read_only_folder_is_refused_before_training(tmp_path: Path, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    ended = run(tmp_path, *tiny(output_dir=small_disk / "output"))
    assert ended.codes == [93]
    assert f"cannot write to {small_disk / 'output'}: Read-only file system" in ended.err[0]
    assert "Traceback" not in ended.text


def test_a_read_only_data_folder_is_no_obstacle(
    tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_npz(small_disk / "x", [[1, 2, 3] * 100] * 5)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    ended = run(tmp_path, *tiny(dataset="GPTDataset", path="", vocab=100, input_dir=small_disk, max_steps=3), world=2)
    assert ended.ok, ended.text
    assert re.search(r"cannot write to .*Read-only file system.*: index maps are saved in ", ended.out[0])


def test_a_config_mistake_is_said_once_per_node(tmp_path: Path) -> None:
    ended = run(tmp_path, *tiny(layers="many"), world=2)
    assert ended.codes == [93, 93]
    assert "Model.num_layers" in ended.err[0]
    assert ended.err[1] == ""


def test_ranks_with_other_layouts_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """An old config on one node. Oracle: the exit code and the words, at once instead of after the timeout."""
    both = {"micro_batch": 2}

    def entry(arguments: Sequence[str]) -> int:
        axis = "Distributed.dp_degree=2" if os.environ["RANK"] == "0" else "Distributed.pp_degree=2"
        return main([*arguments, axis])

    ended = Ranks(tiny(**both), 2, tmp_path, {}, entry).wait(60)
    assert set(ended.codes) <= {93, -9}
    assert (
        "rank 1 has the layout mp 1 × sharding 1 × pp 2 × dp 1, but rank 0 has mp 1 × sharding 1 × pp 1 × dp 2"
        in ended.err[0]
    )
