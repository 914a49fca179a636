"""Verification, retention and the lock of a folder of checkpoints. Oracles: files on disk, and real processes."""

from __future__ import annotations

import builtins
import errno
import fcntl
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from gptctl.remote.fetch import _check as check_copies
from tests.torch_checkpoints import write_torch_checkpoint
from tests.unit.test_checkpoint import SHARD, Keeper, flip, same, state
from trainer.checkpoint import verification
from trainer.checkpoint.folder_lock import OWNER, OwnerFile, identity
from trainer.checkpoint.store import Store
from trainer.checkpoint_names import is_verified
from trainer.errors import UserError
from trainer.slices import whole


def names(folder: Path, pattern: str = "step_*") -> list[str]:
    return sorted(entry.name for entry in folder.glob(pattern))


def test_damage_on_the_disk_is_told_and_the_checkpoint_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for a disk that returns other bytes than were written: they change before the file is read back."""
    keeper = Keeper(tmp_path / "output", keep_last=2)
    store = keeper.checkpoints.store
    for step in (1, 2):
        keeper.save(step)
    drop = verification.drop_from_cache
    monkeypatch.setattr(verification, "drop_from_cache", lambda file: (flip(file, -200), drop(file)))
    keeper.save(3)
    monkeypatch.undo()
    assert [w for w in keeper.warned if f"{store.folder}/step_3 is unusable: {SHARD} is damaged" in w]
    assert [is_verified(folder) for folder in store.checkpoints()] == [False, True, True]
    folder, tensors = keeper.load()
    assert folder.name == "step_2"
    assert same(tensors, state(2))
    assert names(store.folder) == ["step_1", "step_2", "step_3"]  # the damaged one replaces none


def test_a_save_waits_for_no_verification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the first file is read back for ever, later saves succeed, and are not verified."""
    keeper = Keeper(tmp_path / "output", keep_last=2)
    go_on, drop = threading.Event(), verification.drop_from_cache
    monkeypatch.setattr(verification, "drop_from_cache", lambda file: (go_on.wait(60), drop(file)))
    for step in (1, 2, 3, 4):
        keeper.checkpoints.save(step, whole(state(step)), {"step": step})
        assert keeper.checkpoints.wait() == ""
    folder = tmp_path / "output"
    assert names(folder) == ["step_1", "step_2", "step_3", "step_4"]  # none is deleted for one that is not verified
    go_on.set()
    assert keeper.checkpoints.verifier.wait(60)
    assert [name for name in names(folder) if is_verified(folder / name)] == ["step_1"]
    keeper.save(5)
    keeper.save(6)
    assert names(folder) == ["step_5", "step_6"]


def test_a_full_disk_gets_space_by_verifying_what_was_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise no later save would succeed, and so none would be verified, and nothing deleted."""
    keeper = Keeper(tmp_path, keep_last=2)
    keeper.save(1)
    go_on, drop = threading.Event(), verification.drop_from_cache
    monkeypatch.setattr(verification, "drop_from_cache", lambda file: (go_on.wait(60), drop(file)))
    for step in (2, 3):
        keeper.checkpoints.save(step, whole(state(step)), {"step": step})
        assert keeper.checkpoints.wait() == ""
    go_on.set()
    assert keeper.checkpoints.verifier.wait(60)
    assert names(tmp_path) == ["step_1", "step_2", "step_3"]
    monkeypatch.setattr("trainer.checkpoint.OVERHEAD", 1e15)
    assert "not enough disk space" in keeper.save(4)
    assert names(tmp_path) == ["step_2", "step_3"]


def test_the_last_checkpoint_of_a_run_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the one before was still being read back when it was saved."""
    keeper = Keeper(tmp_path / "output")
    go_on, drop = threading.Event(), verification.drop_from_cache
    monkeypatch.setattr(verification, "drop_from_cache", lambda file: (go_on.wait(60), drop(file)))
    for step in (1, 2):
        keeper.checkpoints.save(step, whole(state(step)), {"step": step})
        assert keeper.checkpoints.wait() == ""
    go_on.set()
    keeper.checkpoints.close()
    assert [is_verified(tmp_path / "output" / f"step_{step}") for step in (1, 2)] == [True, True]


def test_a_load_verifies_a_checkpoint_too(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path / "output")
    keeper.save(5)
    folder = tmp_path / "output" / "step_5"
    (folder / f"{SHARD}.verified").unlink()
    assert not is_verified(folder)
    keeper.load()
    assert is_verified(folder)


def test_a_checkpoint_of_another_run_is_not_changed(tmp_path: Path) -> None:
    Keeper(tmp_path / "old").save(5)
    (tmp_path / "old" / "step_5" / f"{SHARD}.verified").unlink()
    Keeper(tmp_path / "new").load(str(tmp_path / "old"))
    assert names(tmp_path / "old" / "step_5", "*") == ["manifest.json", SHARD]


def test_deleting_old_checkpoints_reads_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: every call that opens a file, of Python and of the system interface."""
    keeper = Keeper(tmp_path / "output")
    for step in range(1, 6):
        keeper.save(step)
    seen: list[Any] = []
    os_open, python_open = os.open, builtins.open

    def recorded(path: Any, *given: Any, **more: Any) -> Any:
        seen.append(path)
        return os_open(path, *given, **more)

    monkeypatch.setattr(os, "open", recorded)
    monkeypatch.setattr(builtins, "open", lambda path, *given, **more: (seen.append(path), python_open(path))[1])
    keeper.checkpoints.store.prune(2)
    monkeypatch.undo()
    assert names(tmp_path / "output") == ["step_4", "step_5"]
    # shutil.rmtree opens the folders that it deletes, by their name, and nothing else.
    assert {str(path).rpartition("/")[2] for path in seen} <= {f"step_{step}.tmp" for step in (1, 2, 3)}


def test_checkpoints_that_were_set_aside_are_deleted_too(tmp_path: Path) -> None:
    """The oldest first, and as many stay as of the others; a new one gets a name that is free."""
    keeper = Keeper(tmp_path / "output", keep_last=2)
    folder, store = tmp_path / "output", keeper.checkpoints.store
    for name in ("step_3.aside1", "step_10.aside1", "step_10.aside2", "step_9.aside4"):
        (folder / name).mkdir()
    for step in (9, 11):
        keeper.save(step)
    assert names(folder, "*.aside*") == ["step_10.aside1", "step_10.aside2"]
    (folder / "step_10.aside1").rmdir()
    keeper.checkpoints.keep_last = None
    keeper.save(10)
    keeper.checkpoints.resumed_from(9)
    assert {"step_10.aside2", "step_10.aside3", "step_11.aside1"} <= set(names(folder))
    store.prune(2)
    assert names(folder) == ["step_10.aside3", "step_11.aside1", "step_9"]


def test_a_deletion_that_was_killed_is_completed(tmp_path: Path) -> None:
    """A checkpoint that is half deleted never has the name of a checkpoint."""
    for name in ("step_3.tmp", "step_4.aside1.tmp"):
        (tmp_path / name).mkdir()
    Store(tmp_path).open_for_writing(print)
    assert names(tmp_path) == []


@pytest.fixture
def _no_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for a file system without locks: what its system call answers. Forks inherit it."""

    def fail(*given: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fail)


def hold(folder: Path) -> int:
    """A process that opens the folder, says so, and waits to be killed."""
    ready, says = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            Store(folder).open_for_writing(lambda text: None)
            os.write(says, b"x")
            time.sleep(60)
        finally:
            os._exit(1)
    os.close(says)
    assert os.read(ready, 1) == b"x"
    os.close(ready)
    return pid


@pytest.mark.usefixtures("_no_flock")
def test_without_flock_a_file_locks_the_folder(tmp_path: Path) -> None:
    """Two real processes. The second is refused while the first lives, and takes over once it was killed."""
    pid, told = hold(tmp_path), list[str]()
    (tmp_path / "step_7.tmp").mkdir()  # what the first is writing
    with pytest.raises(UserError, match=f"another run is writing to {tmp_path} .process {pid} on "):
        Store(tmp_path).open_for_writing(told.append)
    assert (tmp_path / "step_7.tmp").exists()
    assert [f"{tmp_path} has no flock (No locks available)" in text for text in told] == [True]
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    store = Store(tmp_path)
    store.open_for_writing(told.append)
    assert not (tmp_path / "step_7.tmp").exists()
    assert json.loads((tmp_path / OWNER).read_text())["pid"] == os.getpid()
    store.close()
    assert names(tmp_path, ".owner*") == []


ELSEWHERE: dict[str, dict[str, Any]] = {
    "another host": {"host": "far-away", "processes": ["its own boot", "pid:[1]"]},
    "another user": {"pid": 2**22 + 2},  # /proc does not show it
    # Its process ids mean nothing here: this one is that of no process, though it is running.
    "another container": {"processes": [identity()["processes"][0], "pid:[1]"], "pid": 2**22 + 1},
}


def foreign_owner(folder: Path, where: str = "another host") -> Path:
    """The file of a run that cannot be seen from here."""
    file = folder / OWNER
    file.write_text(json.dumps({**identity(), **ELSEWHERE[where], "token": "1"}))
    return file


@pytest.mark.parametrize("where", ELSEWHERE)
def test_an_owner_out_of_sight_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """While it touches its file it lives, whatever its clock says; without a change for a while it is dead."""

    def refuse(pid: int, number: int) -> None:
        """What the system call answers for a process of another user, whatever /proc shows."""
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "kill", refuse)
    monkeypatch.setattr("trainer.checkpoint.folder_lock.POLL", 0.01)
    monkeypatch.setattr("trainer.checkpoint.folder_lock.STALE", 30.0)
    file, is_over = foreign_owner(tmp_path, where), threading.Event()
    named = json.loads(file.read_text())

    def touch() -> None:
        for second in range(10_000):
            if is_over.wait(0.01):
                return
            os.utime(file, (second, second))

    toucher = threading.Thread(target=touch)
    toucher.start()
    with pytest.raises(UserError, match=f"process {named['pid']} on {named['host']}"):
        OwnerFile(tmp_path).take()
    is_over.set()
    toucher.join()
    monkeypatch.setattr("trainer.checkpoint.folder_lock.STALE", 0.05)
    owner = OwnerFile(tmp_path)
    owner.take()
    assert owner.is_ours()
    owner.release()


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    """A folder from elsewhere could otherwise make a run overwrite any file of its user."""
    precious = tmp_path / "precious"
    precious.write_text("keep me")
    (tmp_path / ".lock").symlink_to(precious)
    with pytest.raises(UserError, match="cannot write to"):
        Store(tmp_path).open_for_writing(print)
    assert precious.read_text() == "keep me"


@pytest.mark.usefixtures("_no_flock")
def test_a_pipe_instead_of_a_lock_does_not_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.checkpoint.folder_lock.STALE", 0.05)
    os.mkfifo(tmp_path / ".lock")
    os.mkfifo(tmp_path / OWNER)
    store = Store(tmp_path)
    store.open_for_writing(lambda text: None)
    assert json.loads((tmp_path / OWNER).read_text())["pid"] == os.getpid()
    store.close()


@pytest.mark.parametrize("pid", [2**22 + 1, "../1", -1, None])
def test_an_owner_that_was_never_a_process_is_dead(tmp_path: Path, pid: object) -> None:
    """Without a time when it started, too: the folder would be locked forever."""
    (tmp_path / OWNER).write_text(json.dumps({**identity(), "token": "1", "pid": pid, "started": None}))
    owner = OwnerFile(tmp_path)
    owner.take()
    assert owner.is_ours()
    owner.release()


@pytest.mark.usefixtures("_no_flock")
def test_a_run_that_lost_the_folder_deletes_nothing(tmp_path: Path) -> None:
    """It was suspended for so long that another run took over."""
    keeper = Keeper(tmp_path, keep_last=2)
    for step in (1, 2, 3):
        keeper.save(step)
    foreign_owner(tmp_path)
    (tmp_path / "step_4.tmp").mkdir()
    assert keeper.save(4) == f"another run has taken over {tmp_path}"
    with pytest.raises(OSError, match="another run has taken over"):
        keeper.checkpoints.store.prune(1)
    assert names(tmp_path) == ["step_2", "step_3", "step_4.tmp"]
    keeper.checkpoints.close()
    assert (tmp_path / OWNER).exists()  # not ours


@pytest.mark.parametrize("version", [1, 2])
def test_fetch_verifies_checkpoints_of_both_versions(tmp_path: Path, version: int) -> None:
    """A copy on this machine, in which one bit is wrong, or a file is missing."""
    folder, file = tmp_path / "output" / "step_5", SHARD
    if version == 1:
        file = "__0_0.distcp"
        write_torch_checkpoint(folder, state(5), {"step": 5})
    else:
        Keeper(tmp_path / "output").save(5)
    check_copies(tmp_path)
    good = (folder / file).read_bytes()
    flip(folder / file, len(good) // 2)
    with pytest.raises(UserError, match=f"{file} is damaged: wrong checksum"):
        check_copies(tmp_path)
    (folder / file).unlink()
    with pytest.raises(UserError, match=f"is incomplete: no host has {file}"):
        check_copies(tmp_path)
