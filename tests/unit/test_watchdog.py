"""Who is to blame, and which process it is. Oracles: cases written out, and processes of this machine."""

from __future__ import annotations

import os
import re
import subprocess

from tests.conftest import ROOT
from trainer.mesh import wait_for
from trainer.watchdog import WAITING, Answer, find_stuck_ranks
from trainer.watchdog.peer import Peer, _began


def answers(*places: tuple[int, float, bool]) -> list[Answer]:
    return [Answer(rank, ticks, "", idle, waits) for rank, (ticks, idle, waits) in enumerate(places)]


def test_who_is_silent_is_to_blame_before_all_others() -> None:
    assert find_stuck_ranks(answers((7, 9, True), (5, 9, False)), [2], 3, False)[0] == [2]


def test_who_is_behind_is_to_blame_once_it_had_the_time() -> None:
    assert find_stuck_ranks(answers((7, 9, True), (5, 9, False)), [], 3, False)[0] == [1]
    assert find_stuck_ranks(answers((7, 9, True), (5, 1, False)), [], 3, False)[0] == []


def test_a_long_step_of_all_ranks_is_nobodys_fault() -> None:
    together = answers((7, 9, True), (7, 9, False))
    assert find_stuck_ranks(together, [], 3, is_late=False)[0] == []
    assert find_stuck_ranks(together, [], 3, is_late=True)[0] == [1]  # the others have waited for it too long


def test_a_later_process_with_the_same_number_is_another() -> None:
    """So it is never taken for the rank, and never ended."""
    own = Peer.of_this_rank()
    assert own.state
    assert not own.has_exited
    later = own._replace(began="1")
    assert later.has_exited
    assert not later.state
    assert not own._replace(host="elsewhere").has_exited  # nobody can tell


def test_an_exit_is_known_once_the_parent_has_asked_for_it() -> None:
    """A session of its own, as torchrun starts ranks. Until then it is a zombie: torchrun may not have noticed."""
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        rank = Peer.of_this_rank()._replace(pid=process.pid, began=_began(process.pid), leader=process.pid)
        assert not rank.exit_is_known
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert rank.has_exited
        assert not rank.exit_is_known
    assert rank.exit_is_known
    assert rank._replace(leader=os.getsid(0)).exit_is_known  # no torchrun
    assert not rank._replace(leader=os.getpid()).exit_is_known  # its watcher is still there
    assert not rank._replace(host="elsewhere").exit_is_known


def test_ranks_wait_for_messages_in_one_file() -> None:
    """The watchdog knows a waiting rank by the file it is in; elsewhere, it would look busy and get the blame."""
    sources = [ROOT / "trainer/loss.py", *(ROOT / "trainer/parallel").glob("*.py")]
    waits = {source.name: re.findall(r"[\w.()]+\.wait\(\)", source.read_text()) for source in sources}
    assert {name: found for name, found in waits.items() if found} == {"data.py": ["bucket.wait()"]}
    assert WAITING.search(wait_for.__code__.co_filename)
