"""Whether a job of a machine's queue may start: a pure function of the tickets and the free GPUs.

First come, first served. A GPU job waits for its GPUs; any other job uses the processors, and waits
for every other job that does. Jobs of a group do not wait for each other, up to the group's limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Ticket(NamedTuple):
    """What one job uses, or waits for, on one machine."""

    number: int  # its place: lower numbers came first
    job: str  # its id, for people
    run_dir: str  # identifies the job
    gpus: int = 0  # how many it needs here; 0: it uses the processors only
    # The GPUs that it uses once it runs; before, those that it must have. Empty: any.
    devices: tuple[str, ...] = ()
    is_running: bool = False
    waits: bool = False  # for free processors or GPUs
    group: str = ""
    limit: int = 0  # how many jobs of the group may run at once


class GpuUse(NamedTuple):
    """The GPUs of this machine, and those that processes of anybody use."""

    visible: tuple[str, ...] = ()
    busy: frozenset[str] = frozenset()


class Decision(NamedTuple):
    """Whether a job may start; if not, `reason` says what it waits for."""

    reason: str = ""
    devices: tuple[str, ...] = ()  # the GPUs that it gets

    @property
    def may_start(self) -> bool:
        return not self.reason


NO_GPUS = GpuUse()


def decide(own: Ticket, tickets: Iterable[Ticket], gpus: GpuUse = NO_GPUS) -> Decision:
    """Decide whether the job of a waiting ticket may start now."""
    others = [ticket for ticket in tickets if ticket.run_dir != own.run_dir]
    before = _of_group_before(own, others)
    if own.group and len(before) >= own.limit:
        return Decision(f"waits for {_names(before)} (group {own.group}: {own.limit} at once)")
    if not own.waits:
        return Decision(devices=own.devices)
    rivals = [ticket for ticket in others if _compete(own, ticket, gpus)]
    # A job that waits for its group only does not hold up others.
    ahead = [
        ticket
        for ticket in rivals
        if ticket.is_running or (_is_before(ticket, own) and not _waits_for_group(ticket, others))
    ]
    if _needs_gpus(own, gpus):
        return _decide_gpus(own, ahead, rivals, gpus)
    return Decision(_reason(own, ahead, rivals) if ahead else "")


def _decide_gpus(
    own: Ticket, ahead: Sequence[Ticket], rivals: Sequence[Ticket], gpus: GpuUse
) -> Decision:
    used = {device for ticket in ahead if ticket.is_running for device in ticket.devices}
    free = [device for device in gpus.visible if device not in used | gpus.busy]
    # Devices that the machine does not list, such as parts of a GPU, count as free until used.
    missing = [device for device in own.devices if device in used | gpus.busy]
    # A job that asks for more GPUs than there are must not wait forever: it fails by itself.
    number = min(own.gpus, len(gpus.visible))
    has_enough = not missing if own.devices else len(free) >= number
    waiting = [ticket for ticket in ahead if not ticket.is_running]
    if has_enough and not waiting:
        return Decision(devices=own.devices or tuple(free[:number]))
    blocking = [ticket for ticket in ahead if not ticket.is_running or ticket.devices]
    if blocking:
        return Decision(_reason(own, blocking, rivals))
    what = f"GPU {', '.join(missing)}" if own.devices else f"{number} free GPU{'s' * (number > 1)}"
    place = _place(own, rivals)
    use = f"other processes use {len(gpus.busy)} of {len(gpus.visible)}"
    return Decision(f"waits for {what}: {use}{place}")


def _compete(own: Ticket, other: Ticket, gpus: GpuUse) -> bool:
    """Whether two jobs use the same resource: GPUs, or the processors."""
    if not other.is_running and not other.waits:
        return False
    on_gpus = _needs_gpus(own, gpus)
    if _needs_gpus(other, gpus) != on_gpus:
        return False
    return on_gpus or not own.group or own.group != other.group


def _needs_gpus(ticket: Ticket, gpus: GpuUse) -> bool:
    # On a machine without GPUs, jobs that ask for them use the processors, and fail or not.
    return bool(ticket.gpus and gpus.visible)


def _of_group_before(own: Ticket, others: Sequence[Ticket]) -> list[Ticket]:
    """The jobs of the same group that run or came before it."""
    return [
        ticket
        for ticket in others
        if own.group
        and ticket.group == own.group
        and (ticket.is_running or _is_before(ticket, own))
    ]


def _waits_for_group(ticket: Ticket, tickets: Sequence[Ticket]) -> bool:
    others = [other for other in tickets if other.run_dir != ticket.run_dir]
    return bool(ticket.group) and len(_of_group_before(ticket, others)) >= ticket.limit


def _is_before(ticket: Ticket, own: Ticket) -> bool:
    return not ticket.is_running and ticket.number < own.number


def _reason(own: Ticket, blocking: Sequence[Ticket], rivals: Sequence[Ticket]) -> str:
    return f"waits for {_names(blocking)}{_place(own, rivals)}"


def _place(own: Ticket, rivals: Sequence[Ticket]) -> str:
    waiting = [ticket for ticket in rivals if not ticket.is_running]
    place = 1 + sum(ticket.number < own.number for ticket in waiting)
    return f" ({place} of {len(waiting) + 1} in the queue)"


def _names(tickets: Sequence[Ticket]) -> str:
    """The jobs, running ones first: `gpt-1`, `gpt-1 and gpt-2`, `gpt-1 and 3 others`."""
    # A job on several hosts that are one machine has several tickets.
    ordered = sorted(tickets, key=lambda ticket: (not ticket.is_running, ticket.number))
    names = list(dict.fromkeys(ticket.job for ticket in ordered))
    if len(names) > 2:
        return f"{names[0]} and {len(names) - 1} others"
    return " and ".join(names)
