"""Slurm's reasons why a job is pending, in words, each with what can be done. Pure."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import NamedTuple


class ReasonText(NamedTuple):
    cause: str
    fix: str


_WAIT = "wait; with fewer nodes, a shorter --time or another partition it may start sooner"
_ASK = "ask the administrator of the cluster"
_SMALLER = "cancel it, and request what the cluster has: `sinfo` shows partitions and limits"
_RELEASE = "release it: scontrol release ID"
_ACCOUNT = "cancel it, and use an --account that may run here: sacctmgr show assoc user=$USER"
_QOS = "cancel it, and use a --qos that you may use: sacctmgr show assoc user=$USER"
_BURST = "wait; the cluster prepares its burst buffer"
_POWER = "wait: the cluster saves power"

REASONS = MappingProxyType(
    {
        "None": ReasonText("Slurm has not looked at the job yet", "wait a few seconds"),
        "Resources": ReasonText("the nodes, GPUs or memory that it needs are in use", _WAIT),
        "Priority": ReasonText("jobs with a higher priority are waiting before it", _WAIT),
        "SchedDefer": ReasonText("Slurm starts jobs only in its regular rounds", "wait"),
        "BeginTime": ReasonText(
            "its start time has not come; after a requeue, Slurm waits about two minutes",
            "wait, or start it now: scontrol update JobId=ID StartTime=now",
        ),
        "Dependency": ReasonText(
            "it waits for another job to end",
            "wait for that job; `scontrol show job ID` names it under Dependency",
        ),
        "DependencyNeverSatisfied": ReasonText(
            "the job that it waits for did not end as required",
            "cancel it, run the other job again, and submit this one with --after",
        ),
        "JobHeldUser": ReasonText("you, or gptctl during the submission, hold it", _RELEASE),
        "JobHeldAdmin": ReasonText("an administrator holds it", _ASK),
        "JobHoldMaxRequeue": ReasonText(
            "it was requeued too often, so Slurm holds it",
            "see why it ended each time (gptctl logs --failed --attempt N), then release it: "
            "scontrol release ID",
        ),
        "JobLaunchFailure": ReasonText(
            "Slurm could not start it on its nodes, and holds it",
            "check the nodes (gptctl doctor), then release it: scontrol release ID",
        ),
        "launch_failed_requeued_held": ReasonText(
            "Slurm could not start it on its nodes, and holds it",
            "check the nodes (gptctl doctor), then release it: scontrol release ID",
        ),
        "JobArrayTaskLimit": ReasonText(
            "as many runs of its sweep as allowed are running",
            "wait, or raise the limit: scontrol update JobId=ID ArrayTaskThrottle=N",
        ),
        "ReqNodeNotAvail": ReasonText(
            "nodes that it needs are down, drained, reserved, or about to be: often maintenance",
            "wait, choose other nodes (--nodelist, --exclude), or a --time that ends before it; "
            "`scontrol show reservation` and `sinfo -R` tell why",
        ),
        "NodeDown": ReasonText("a node that it needs is down", "use others, or wait: sinfo -R"),
        "FrontEndDown": ReasonText("no front-end node is up", _ASK),
        "BadConstraints": ReasonText(
            "no nodes have what it requests: constraint, GPUs, memory or number of nodes", _SMALLER
        ),
        "Licenses": ReasonText("the licenses that it requests are in use", "wait for them"),
        "Reservation": ReasonText(
            "it waits for the start of its reservation, or for resources in it",
            "wait, or submit it without --reservation: scontrol show reservation",
        ),
        "ReservationDeleted": ReasonText(
            "its reservation was deleted", "cancel it, and submit it without --reservation"
        ),
        "PartitionDown": ReasonText(
            "the partition accepts jobs, but starts none", "wait, or use another --partition"
        ),
        "PartitionInactive": ReasonText(
            "the partition is switched off", "use another --partition: sinfo lists them"
        ),
        "PartitionNodeLimit": ReasonText(
            "it requests more or fewer nodes than the partition allows", _SMALLER
        ),
        "PartitionTimeLimit": ReasonText(
            "its time limit is longer than the partition allows",
            "cancel it, and submit it with a shorter --time; --chain continues it afterwards",
        ),
        "PartitionConfig": ReasonText(
            "the partition does not allow what it requests", "scontrol show partition shows limits"
        ),
        "TimeLimit": ReasonText("it reached its time limit", "submit it with a longer --time"),
        "DeadLine": ReasonText("it cannot end before its deadline", "submit it without --deadline"),
        "InactiveLimit": ReasonText("the job was inactive for too long", "submit it again"),
        "InvalidAccount": ReasonText("its account does not exist", _ACCOUNT),
        "AccountNotAllowed": ReasonText("its account may not use this partition", _ACCOUNT),
        "AccountingPolicy": ReasonText("a limit of the accounting holds it back", _ASK),
        "InvalidQOS": ReasonText("its QOS does not exist", _QOS),
        "QOSNotAllowed": ReasonText("its QOS may not be used in this partition", _QOS),
        "QOSUsageThreshold": ReasonText(
            "your share is used up, and the QOS requires a minimum of it", f"wait, or {_ASK}"
        ),
        "QOSJobLimit": ReasonText("its QOS runs as many jobs as allowed", "wait, or another --qos"),
        "QOSResourceLimit": ReasonText("a limit of its QOS is reached", "wait, or another --qos"),
        "QOSTimeLimit": ReasonText("the time of its QOS is used up", "wait, or use another --qos"),
        "AssociationJobLimit": ReasonText(
            "your account runs as many jobs as allowed", "wait until one ends"
        ),
        "AssociationResourceLimit": ReasonText(
            "a limit of your account is reached", "wait until your jobs end, or request less"
        ),
        "AssociationTimeLimit": ReasonText(
            "the time of your account is used up", f"use another --account, or {_ASK}"
        ),
        "MaxMemPerLimit": ReasonText(
            "it requests more memory per node or processor than allowed", "use a smaller --mem"
        ),
        "SystemFailure": ReasonText("Slurm itself, a file system or the network failed", _ASK),
        "NonZeroExitCode": ReasonText("it failed before, and is held", "see gptctl logs --failed"),
        "OutOfMemory": ReasonText("it was out of memory before", "submit it with a larger --mem"),
        "Prolog": ReasonText("the prolog of the nodes is running", "wait; if it stays, " + _ASK),
        "Cleaning": ReasonText("its last run is still being cleaned up", "wait"),
        "FedJobLock": ReasonText("the clusters of the federation decide who starts it", "wait"),
        "BurstBufferResources": ReasonText("the burst buffer has no space", _BURST),
        "BurstBufferStageIn": ReasonText("files are copied to the burst buffer", _BURST),
        "BurstBufferOperation": ReasonText("an operation of the burst buffer failed", _ASK),
        "PowerNotAvail": ReasonText("there is not enough electric power for it", _POWER),
        "PowerReserved": ReasonText("electric power is reserved for other jobs", _POWER),
    }
)

# Limits of an account (association) or QOS: AssocGrpCpuLimit, QOSMaxGRESPerUser, MaxJobsPerAccount.
_LIMIT = re.compile(
    r"(Assoc|QOS|)(Grp|Max|Min)"
    r"(CPU|Cpu|Memory|Mem|Node|GRES|License|BB|Energy|Billing|Unknown|Jobs|Submit|Wall|WallDuration)"
    r"([A-Za-z]{0,60})"
)
_WHAT = MappingProxyType(
    {
        "CPU": "processors",
        "Cpu": "processors",
        "Memory": "memory",
        "Mem": "memory",
        "Node": "nodes",
        "GRES": "GPUs (or other generic resources)",
        "License": "licenses",
        "BB": "space in the burst buffer",
        "Energy": "energy",
        "Billing": "billing units",
        "Unknown": "a resource",
        "Jobs": "running jobs",
        "Submit": "submitted jobs",
        "Wall": "time",
    }
)
_OWNERS = MappingProxyType({"Assoc": "your account", "QOS": "its QOS", "": "your account"})


def reason_text(reason: str) -> ReasonText | None:
    """Return the words for a reason as squeue prints it; None for one that is not known."""
    # Details may follow: `ReqNodeNotAvail, UnavailableNodes:node[1-2]`, also with underscores.
    word = re.split(r"[,(]|_(?=[A-Z(])", reason.strip("() "), maxsplit=1)[0].strip(" _")
    if word in REASONS:
        return REASONS[word]
    limit = _LIMIT.match(word)
    return _of_limit(*limit.groups()) if limit else None


def _of_limit(owner: str, kind: str, resource: str, rest: str) -> ReasonText:
    what, whose = _WHAT[resource], _OWNERS[owner]
    if kind == "Min":
        return ReasonText(f"it requests fewer {what} than {whose} requires", _QOS)
    if "Minutes" in rest:
        cause = f"the budget of {whose} ({what} × time) is used up, or too small for this job"
        return ReasonText(cause, f"request less, use another --account or --qos, or {_ASK}")
    if "PerJob" in rest or "PerNode" in rest or (resource, kind) == ("Wall", "Max"):
        cause = f"it requests more {what} than {whose} allows for one job"
        return ReasonText(cause, "cancel it, and request less")
    if kind == "Max":
        cause = f"your jobs have as many or as much as {whose} allows: {what}"
        return ReasonText(cause, "wait until your other jobs end, or cancel one")
    cause = f"all jobs of {whose} together have as many or as much as allowed: {what}"
    return ReasonText(cause, "wait until some end, or use another --account or --qos")
