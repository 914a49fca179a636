"""Failures of NCCL, gloo, the rendezvous, names and ssh. The most specific come first."""

from __future__ import annotations

from gptctl.jobs.failures.gpu_failures import DOCTOR, ELSEWHERE, FIRST_LINES
from gptctl.jobs.failures.signature import Signature

DEBUG = "gptctl rerun {job} --env NCCL_DEBUG=INFO"

SIGNATURES = (
    Signature(
        "K020",
        "InfiniBand or RoCE does not work between nodes",
        "A port is down, has no valid GID, or cannot reach the port of the other node.",
        "check the ports with ibstat; on RoCE set NCCL_IB_GID_INDEX, on a rail-only fabric "
        "NCCL_CROSS_NIC=0; NCCL_IB_DISABLE=1 runs without, slowly",
        (
            r"\bibv_\w{1,40} failed",
            r"NET/IB ?: .{0,80}(completion .{0,40}error|[Nn]o active|async (fatal )?event)",
            r"(?i)no (valid|usable) gid|GID index .{0,40}(invalid|not found)",
            r"(?i)\bmlx\d_\d{1,2}\b.{0,80}port (is )?(down|not active)",
        ),
        (DOCTOR, "gptctl rerun {job} --env NCCL_IB_DISABLE=1"),
    ),
    Signature(
        "K021",
        "the network interface does not exist",
        "NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names an interface that this node does not have, "
        "or that has no address.",
        "delete the variable, or set master_interface of the profile to a name that all nodes have",
        (
            r"no socket interface found",
            r"no NCCL_SOCKET_IFNAME interface found",
            r"Unable to find (address|interface) for",
            r"neither AF_INET\(2\) nor AF_INET6",
            r"has no IPv4 address on master_interface",
        ),
        (DOCTOR,),
    ),
    Signature(
        "K022",
        "different versions of NCCL",
        "The ranks loaded different versions of NCCL.",
        "use the same environment on all nodes, and no LD_LIBRARY_PATH or LD_PRELOAD for NCCL",
        (r"Mismatched NCCL version detected", r"NCCL version mismatch"),
        (DOCTOR,),
    ),
    Signature(
        "K023",
        "ranks called different collectives",
        "One rank called another operation, or with another shape, than the others.",
        "look for a branch in the code that only some ranks take",
        (r"Detected mismatch between collectives", r"[Cc]ollective .{0,40}mismatch"),
        ("gptctl logs {job} --errors", FIRST_LINES),
    ),
    Signature(
        "K024",
        "a rank does not respond",
        "A rank was stopped, or is stuck, and the others waited for it.",
        "read the stacks of all threads in the log folder (stacks.RANK); if it is always the same "
        "node, exclude it",
        (r"does not respond", r"does not make progress"),
        (FIRST_LINES, ELSEWHERE),
    ),
    Signature(
        "K025",
        "the port of the rendezvous is in use",
        "Another process on the first node listens on that port: often an earlier run.",
        "delete Launch.rdzv.port: gptctl chooses a free port",
        (r"EADDRINUSE", r"socket has failed to (listen|bind)"),
        ("gptctl rerun {job}",),
    ),
    Signature(
        "K036",
        "a port that the program listens on is in use",
        "Another process on the node listens on that port: often an earlier run, or another rank.",
        "choose another port in the program, or end the process that uses it",
        (r"(?i)address already in use",),
        ("gptctl rerun {job}",),
    ),
    Signature(
        "K026",
        "a host name cannot be resolved",
        "DNS or /etc/hosts of the node does not know the name of another node, or gives a loopback "
        "address.",
        "use addresses, fix /etc/hosts, or set master_interface of the profile",
        (
            r"Name or service not known",
            r"Temporary failure in name resolution",
            r"No address associated with hostname",
            r"nodename nor servname provided",
            r"[Cc]annot resolve (host name |\S{1,255} to an address)",
            r"Could not resolve host",
            r"has no address that other nodes can reach",
        ),
        (DOCTOR,),
    ),
    Signature(
        "K027",
        "the key of an ssh host is unknown or has changed",
        "ssh does not trust the host: it was installed again, or is new to this machine.",
        "ask the administrator for its fingerprint, then trust it",
        (
            r"Host key verification failed",
            r"REMOTE HOST IDENTIFICATION HAS CHANGED",
            r"its host key (is not in|has CHANGED)",
        ),
        ("gptctl hosts trust {cluster}",),
    ),
    Signature(
        "K028",
        "ssh does not accept the user",
        "The host knows none of the keys that were offered.",
        "add your public key there, or set user and identity_file in the profile",
        (
            r"Permission denied \((publickey|password|keyboard|gssapi|hostbased)",
            r"does not accept .{0,80}key",
            r"Too many authentication failures",
        ),
        (DOCTOR,),
    ),
    Signature(
        "K029",
        "a host was lost",
        "The machine, its network, or gptctl's agent there stopped.",
        "check that the host is up; run on others until it is",
        (r"^its host is lost: ", r": its host is lost: "),
        (DOCTOR, ELSEWHERE),
    ),
    Signature(
        "K030",
        "no route between nodes",
        "The nodes cannot reach each other on the network that they chose: a firewall, a wrong "
        "interface, or a private address.",
        "set master_interface of the profile to the network that connects the nodes",
        (
            r"No route to host",
            r"(?i)network is unreachable",
            r"connectFullMesh failed",
            r"(?i)gloo.{0,200}connect .{0,80}(timeout|timed out|refused)",
            r"Connect timeout \[",
        ),
        (DOCTOR,),
    ),
    Signature(
        "K031",
        "ranks or nodes did not meet",
        "Not all nodes reached the rendezvous in time: one did not start, or cannot reach the "
        "first node's port.",
        "look for the node whose log is missing or ends early, and check the network between nodes",
        (
            r"client socket has timed out after",
            r"failed to connect to any network address",
            r"Rendezvous(Timeout|Connection|Closed)Error",
            r"Timed out .{0,60}waiting for clients",
            r"waiting for .{0,40}workers? to join",
        ),
        ("gptctl logs {job} --list", DOCTOR),
        is_general=True,
    ),
    Signature(
        "K032",
        "a collective of NCCL timed out",
        "The ranks did not all reach a collective: one failed, is much slower, waits for data, or "
        "took another path.",
        "find the rank that lags; raise Distributed.timeout_minutes only if the wait is expected",
        (
            r"Watchdog caught collective operation timeout",
            r"collective operation timeout",
            r"watchdog got stuck",
            r"Timed out waiting \d",
        ),
        ("gptctl logs {job} --errors", DEBUG),
        is_general=True,
    ),
    Signature(
        "K033",
        "NCCL lost another rank or the network",
        "A process at the other end exited, or a system call on the network failed.",
        "see which rank exited first; if none did, run again with NCCL_DEBUG=INFO",
        (
            r"ncclSystemError",
            r"ncclRemoteError",
            r"(?i)unhandled system error",
            r"(?i)remote process (has )?exited",
            r"NCCL WARN .{0,80}Connection closed by remote peer",
        ),
        ("gptctl logs {job} --errors", DEBUG),
        is_general=True,
    ),
    Signature(
        "K034",
        "NCCL failed",
        "An error of CUDA inside NCCL, or a wrong use of it.",
        "run again with NCCL_DEBUG=INFO: the lines before the error name the reason",
        (
            r"nccl(UnhandledCuda|Internal)Error",
            r"ncclInvalid(Usage|Argument)",
            r"(?i)unhandled cuda error",
            r"NCCL communicator was aborted",
        ),
        (DEBUG, FIRST_LINES),
        is_general=True,
    ),
    Signature(
        "K035",
        "the connection to another rank was lost",
        "Another rank exited, and this one noticed: the cause is elsewhere.",
        "look for the rank or node that ended without an error of its own",
        (
            r"(?i)connection (closed|reset) by (remote )?peer",
            r"Broken pipe",
            r"recvValue failed",
            r"pair closure",
            r"Connection refused",
        ),
        ("gptctl logs {job} --list", "gptctl logs {job} --errors"),
        is_general=True,
    ),
)
