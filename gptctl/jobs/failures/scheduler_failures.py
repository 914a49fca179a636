"""Ends that a scheduler, a signal or a person caused. The most specific come first."""

from __future__ import annotations

from gptctl.engine.job_result import CANCELLED, LOST, NODE_FAIL, PREEMPTED, STOPPED, TIMEOUT
from gptctl.jobs.failures.gpu_failures import DOCTOR, ELSEWHERE, FIRST_LINES
from gptctl.jobs.failures.program_failures import RESUME
from gptctl.jobs.failures.signature import Signature

# Told by its reason: the state alone says that somebody cancelled the job.
UNMET = Signature(
    "K101",
    "the job that it waited for ended otherwise",
    "It was to start only after another job, which did not end as was asked.",
    "fix that job first, then run this one again",
    (r"and this job starts only if it",),
    ("gptctl rerun {job}",),
)

SIGNATURES = (
    UNMET,
    Signature(
        "K090",
        "time limit reached",
        "The job needed more time than its limit.",
        "resume it with a longer limit, or submit it as a chain",
        (r"DUE TO TIME LIMIT",),
        (f"{RESUME} --time 1-00:00:00", "gptctl submit --chain 5"),
        states=(TIMEOUT,),
    ),
    Signature(
        "K091",
        "preempted by another job",
        "A job with a higher priority took the nodes, and this one may not be requeued.",
        "let Slurm requeue it, or resume it now",
        (r"DUE TO PREEMPTION",),
        (f"{RESUME} --requeue",),
        states=(PREEMPTED,),
    ),
    Signature(
        "K092",
        "a node failed",
        "A node of the job crashed, or lost its connection to the scheduler.",
        "resume it on other nodes, and let Slurm requeue it the next time",
        (r"DUE TO NODE FAILURE", r"[Nn]ode failure on "),
        (f"{RESUME} --requeue", ELSEWHERE),
        states=(NODE_FAIL,),
    ),
    Signature(
        "K093",
        "Slurm could not start the job script",
        "The node does not see the job's folder, or cannot write its log file.",
        "run_root of the profile must have the same path on every node",
        (
            r"could not start the job script",
            r"JobLaunchFailure",
            r"execve\(\): .{0,200}(No such file|Permission denied)",
            r"[Cc]ould not open (stdout|stderr|stdin) file",
        ),
        (DOCTOR, ELSEWHERE),
    ),
    Signature(
        "K094",
        "Slurm rejects account, partition or QOS",
        "The account may not use this partition or QOS, or one of them does not exist.",
        "use those that `sacctmgr show assoc user=$USER` and `sinfo` list",
        (
            r"Invalid account or account/partition combination",
            r"[Ii]nvalid (partition|qos|account) ",
            r"Requested (node configuration|partition configuration) (is )?not available",
            r"[Ii]nvalid (feature|generic resource|gres)",
        ),
        ("gptctl rerun {job} --partition P --account A",),
    ),
    Signature(
        "K095",
        "Slurm could not start the ranks",
        "srun did not get its step: the controller or a node did not answer, or clocks differ.",
        "run it again; if it happens often, ask the administrator",
        (
            r"srun: error: .{0,80}(Unable to (create step|confirm allocation)|Socket timed out)",
            r"[Jj]ob credential (expired|revoked|replayed)",
            r"[Mm]unge (en|de)code failed",
            r"Task launch for .{0,60}failed",
        ),
        ("gptctl rerun {job} --resume", DOCTOR),
    ),
    Signature(
        "K096",
        "the terminal or session was closed",
        "The process got SIGHUP, which torchrun takes as a request to stop.",
        "submit it with gptctl, which detaches jobs; do not start torchrun in a terminal that "
        "closes",
        (
            r"got signal: 1\b",
            r"Received Signals\.SIGHUP death signal",
            r"killed by signal 1 \(SIGHUP\)",
        ),
        ("gptctl rerun {job} --resume",),
        signals=(1,),
    ),
    Signature(
        "K097",
        "stopped by a signal",
        "Somebody, or a scheduler, asked the process to stop.",
        "resume it",
        (
            r"killed by signal (15|2) ",
            r"Received Signals\.SIG(TERM|INT) death signal",
            r"^KeyboardInterrupt$",
        ),
        (RESUME,),
        signals=(2, 15),
        is_general=True,
    ),
    Signature(
        "K098",
        "stopped on request",
        "The job was asked to stop, saved a checkpoint and ended.",
        "resume it when you like",
        commands=(RESUME,),
        states=(STOPPED,),
    ),
    Signature(
        "K099",
        "cancelled",
        "Somebody cancelled the job.",
        "resume it, or run it again",
        commands=(RESUME, "gptctl rerun {job}"),
        states=(CANCELLED,),
    ),
    Signature(
        "K100",
        "disappeared without reporting a result",
        "The machine was restarted, or all processes of the job were killed at once.",
        "check that the machine was not restarted and has enough memory, then resume",
        commands=(RESUME, FIRST_LINES),
        states=(LOST,),
    ),
)
