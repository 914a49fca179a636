"""Who may start, over random tickets, arrivals and ends. Oracles: counts of what runs at the same time, and the order in
which jobs came."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from gptctl.engine.queue_rules import GpuUse, Ticket, decide

JOBS = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from(["", "", "a", "b"]), st.booleans(), st.sampled_from([(), ("0",), ("1", "3")])),
    min_size=1,
    max_size=12,
)  # fmt: skip


def tickets_of(jobs: list[tuple[int, str, bool, tuple[str, ...]]]) -> list[Ticket]:
    """`gpus` 0 is a job on the processors; a named device makes one of as many GPUs."""
    return [
        Ticket(
            number,
            f"job-{number}",
            f"/{number}",
            gpus=len(devices) or gpus,
            devices=devices,
            waits=waits or not group,
            group=group,
            limit=2 if group else 0,
        )
        for number, (gpus, group, waits, devices) in enumerate(jobs, 1)
    ]


class Machine:
    """A machine with some GPUs on which jobs start whenever the rule allows it."""

    def __init__(self, tickets: list[Ticket], gpus: GpuUse, random: random.Random) -> None:
        self.waiting, self.running, self.gpus, self.random = tickets, list[Ticket](), gpus, random
        self.started: list[Ticket] = []

    def start_what_may(self) -> None:
        """Ask for each job in any order, as the processes of the jobs do."""
        for ticket in self.random.sample(self.waiting, len(self.waiting)):
            decision = decide(ticket, [*self.waiting, *self.running], self.gpus)
            if decision.may_start:
                self.waiting.remove(ticket)
                earlier = [other for other in self.waiting if other.group == ticket.group != ""]
                assert sum(other.number < ticket.number for other in earlier) < max(1, ticket.limit)
                devices = decision.devices or self.gpus.visible[: ticket.gpus]
                self.running.append(ticket._replace(is_running=True, devices=devices))
                self.started.append(ticket)
            else:
                assert "waits for" in decision.reason
        self.check()

    def check(self) -> None:
        on_gpus = [ticket for ticket in self.running if ticket.gpus and self.gpus.visible and ticket.waits]
        used = [device for ticket in on_gpus for device in ticket.devices]
        assert len(used) == len(set(used))
        assert not set(used) & self.gpus.busy
        for group in "ab":
            assert sum(ticket.group == group for ticket in self.running) <= 2
        # On the processors: one job, or jobs of one group.
        others = [ticket for ticket in self.running if ticket not in on_gpus and ticket.waits]
        assert len({ticket.group or ticket.job for ticket in others}) <= 1

    def end_one(self) -> None:
        self.running.remove(self.random.choice(self.running))


@given(JOBS, st.sampled_from([(), ("0", "1", "2", "3")]), st.randoms(use_true_random=False))
def test_all_start_in_order_and_share_nothing(
    jobs: list[tuple[int, str, bool, tuple[str, ...]]], visible: tuple[str, ...], random: random.Random
) -> None:
    tickets = tickets_of(jobs)
    machine = Machine(list(tickets), GpuUse(visible), random)
    for _ in range(2 * len(tickets)):
        machine.start_what_may()
        if machine.running:
            machine.end_one()
    assert machine.waiting == []
    # First come, first served among jobs that want the same and are in no group.
    for on_gpus in (True, False):
        alike = [
            ticket.number for ticket in machine.started if bool(ticket.gpus and visible) == on_gpus and not ticket.group
        ]
        assert alike == sorted(alike)


@given(JOBS, st.sets(st.sampled_from("0123"), min_size=1), st.randoms(use_true_random=False))
def test_gpus_of_other_programs_are_left_alone(
    jobs: list[tuple[int, str, bool, tuple[str, ...]]], busy: set[str], random: random.Random
) -> None:
    machine = Machine(tickets_of(jobs), GpuUse(("0", "1", "2", "3"), frozenset(busy)), random)
    for _ in jobs:
        machine.start_what_may()
        if machine.running:
            machine.end_one()


def test_the_reason_names_the_job_and_the_place() -> None:
    running = Ticket(1, "gpt-1", "/1", is_running=True)
    second, third = (Ticket(number, f"gpt-{number}", f"/{number}", waits=True) for number in (2, 3))
    tickets = [running, second, third]
    assert decide(second, tickets).reason == "waits for gpt-1 (1 of 2 in the queue)"
    assert decide(third, tickets).reason == "waits for gpt-1 and gpt-2 (2 of 2 in the queue)"
    other = GpuUse(("0", "1"), frozenset("1"))
    both = Ticket(4, "gpt-4", "/4", gpus=2, waits=True)
    assert (
        decide(both, tickets, other).reason == "waits for 2 free GPUs: other processes use 1 of 2 (1 of 1 in the queue)"
    )
    sweep = [Ticket(n, f"s-{n}", f"/s{n}", group="sweep", limit=1, is_running=n == 5) for n in (5, 6)]
    assert decide(sweep[1], sweep).reason == "waits for s-5 (group sweep: 1 at once)"


def test_two_jobs_share_eight_gpus() -> None:
    eight = GpuUse(tuple("01234567"))
    first, second, third = (Ticket(n, f"gpt-{n}", f"/{n}", gpus=4, waits=True) for n in (1, 2, 3))
    assert decide(first, [first, second, third], eight).devices == tuple("0123")
    first = first._replace(is_running=True, devices=tuple("0123"))
    assert decide(second, [first, second, third], eight).devices == tuple("4567")
    assert not decide(third, [first, second, third], eight).may_start
