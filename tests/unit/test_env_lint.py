"""Checks of environment variables: which rule answers which mistake, and what stays silent."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gptctl.spec import env_lint as environ
from gptctl.spec import env_names as environ_names
from gptctl.spec.env_lint import Job, lint
from trainer.errors import Rule

JOB = Job(nodes=2, world=16, device="gpu", mp=1, sharding=1, cpus_per_task=32, gpus_per_node=8)

CLEAN: list[dict[str, str]] = [
    {},
    {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "bond0", "LOGLEVEL": "INFO"},
    {"NCCL_DEBUG": "WARN"},
    {
        "NCCL_IB_HCA": "mlx5_0",
        "NCCL_PXN_DISABLE": "1",
        "NCCL_IB_TIMEOUT": "22",
        "NCCL_IB_RETRY_CNT": "13",
        "NCCL_IB_PCI_RELAXED_ORDERING": "1",
        "NCCL_IB_GID_INDEX": "3",
    },
    {"FI_PROVIDER": "efa"},
    {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "OFI_NCCL_PROTOCOL": "RDMA"},
    {"HF_HOME": "/x", "WANDB_MODE": "offline", "MY_VAR": "1"},
    {"TOKENIZERS_PARALLELISM": "false", "TOKEN_FILE": "/x", "MAX_TOKENS": "5", "HF_TOKEN": "", "EOS_TOKEN": "x"},
    {"NCCL_DEBUG": "info", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": "/runs/nccl.%h.%p"},
    {"NCCL_DEBUG_SUBSYS": "^ALLOC,env"},
    {"NCCL_SOCKET_IFNAME": "^lo,docker0", "GLOO_SOCKET_IFNAME": "eth0"},
    {"NCCL_SOCKET_IFNAME": "=eth0,eth1", "GLOO_SOCKET_IFNAME": "eth1", "TP_SOCKET_IFNAME": "eth0"},
    {"NCCL_SOCKET_IFNAME": "eth", "GLOO_SOCKET_IFNAME": "eth0,eth1"},
    {"NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1", "NCCL_IB_TC": "0x6a", "NCCL_IB_SL": "-1"},
    {"NCCL_P2P_LEVEL": "NVL", "NCCL_NET_GDR_LEVEL": "3", "NCCL_CROSS_NIC": "0", "NCCL_NVLS_ENABLE": "2"},
    {"NCCL_P2P_DISABLE": "0", "TORCH_NCCL_NAN_CHECK": "false", "TORCH_DISTRIBUTED_DEBUG": "info"},
    {"NCCL_VERSION": "2.32.3", "NCCL_ROOT": "/usr"},
    {"NCCL_IB_TIMEOUT": "", "NCCL_DEBUG": ""},
    {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "TORCH_NCCL_ENABLE_MONITORING": "1"},
    {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_FR_BUFFER_SIZE": "2000", "TORCH_FR_DUMP_TEMP_FILE": "/runs/a/trace_"},
    {"OMP_NUM_THREADS": "4", "PYTHONUNBUFFERED": "1", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    {"OMP_NUM_THREADS": "4,2"},
    {"TP_SIZE": "8", "TORCH_EXTRA": "1", "NCORES": "4", "RCCL_MSCCL_ENABLE": "0"},
    {"NCCL_FASTRAK_ENABLE_HOTPATH_LOGGING": "0", "NCCL_TUNER_CONFIG_PATH": "/x"},
    {"NCCL_OOB_NET_ENABLE": "1", "NCCL_OOB_NET_IFNAME": "eth0"},
    {"TORCHELASTIC_ERROR_FILE": "/runs/error.json", "TORCH_SHOW_CPP_STACKTRACES": "1"},
]

# What is set, what is special about the job, and exactly which rules answer, in order.
MISTAKES: list[tuple[dict[str, str], dict[str, Any], str]] = [
    ({"HF_TOKEN": "hf_1"}, {}, "E032"),
    ({"WANDB_API_KEY": "1", "AWS_SECRET_ACCESS_KEY": "2", "DB_PASSWORD": "3"}, {"device": "cpu"}, "E032 E032 E032"),
    ({"MY-VAR": "1"}, {}, "E001"),
    ({"1ST": "1"}, {}, "E001"),
    ({"": "1"}, {}, "E001"),
    ({"UID": "0"}, {}, "E001"),
    ({"RANK": "0"}, {}, "E002"),
    ({"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}, {}, "E002 E002"),
    ({"TORCHELASTIC_RUN_ID": "7"}, {}, "E002"),
    ({"PET_NNODES": "4"}, {}, "E002"),
    ({"SLURM_JOB_ID": "7"}, {}, "E002"),
    ({"SLURM_CPU_BIND": "none"}, {}, "E003"),
    ({"SBATCH_PARTITION": "gpu"}, {}, "E003"),
    ({"NCCL_SOCKET_IFNMAE": "eth0"}, {}, "E004"),
    ({"nccl_debug": "WARN"}, {}, "E004"),
    ({"NCLL_DEBUG": "WARN"}, {}, "E004"),
    ({"TORCH_NCCL_HEARTBEAT_TIMEOUT": "600"}, {}, "E004"),
    ({"TORCH_LOG": "dynamo"}, {}, "E004"),
    ({"PYTORCH_CUDA_ALOC_CONF": "x"}, {}, "E004"),
    ({"TP_SOCKET_IFNAMES": "eth0"}, {}, "E004"),
    ({"NCCL_FOO": "1"}, {}, "E005"),
    ({"TORCHELASTIC_QQQQQQQQQQQQ": "1"}, {}, "E005"),
    ({"NCCL_TIMEOUT": "1800"}, {}, "E006"),
    ({"NCCL_TREE_THRESHOLD": "0", "NCCL_LL_THRESHOLD": "0"}, {}, "E006 E006"),
    ({"NCCL_IB_CUDA_SUPPORT": "1", "NCCL_IB_GDR_LEVEL": "2"}, {}, "E006 E006"),
    ({"NCCL_AVOID_RECORD_STREAMS": "1"}, {}, "E006"),
    ({"TORCH_NCCL_FLIGHT_RECORDER_ENABLED": "1"}, {}, "E006"),
    ({"NCCL_ASYNC_ERROR_HANDLING": "3"}, {}, "E007"),
    ({"NCCL_DESYNC_DEBUG": "1"}, {}, "E007 E020"),
    ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}, {}, "E007"),
    ({"NCCL_MIN_NRINGS": "4"}, {}, "E007"),
    ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_FR_BUFFER_SIZE": "2000"}, {}, "E007"),
    ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_FR_BUFFER_SIZE": "500"}, {}, "E008"),
    ({"PYTORCH_CUDA_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "b:1"}, {}, "E008"),
    ({"NCCL_IB_DISABLE": "true"}, {}, "E009"),
    ({"NCCL_P2P_DISABLE": "yes"}, {}, "E009"),
    ({"NCCL_IB_TIMEOUT": "22s"}, {}, "E009"),
    ({"TORCH_FR_BUFFER_SIZE": ""}, {}, "E009"),
    ({"TORCH_FR_BUFFER_SIZE": "0x10"}, {}, "E009"),
    ({"OMP_NUM_THREADS": "all"}, {}, "E009"),
    ({"NCCL_IB_TIMEOUT": "32"}, {}, "E010"),
    ({"NCCL_IB_SL": "16", "NCCL_IB_TC": "256", "NCCL_CROSS_NIC": "3"}, {}, "E010 E010 E010"),
    ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "4"}, {}, "E010"),
    ({"CUDA_DEVICE_MAX_CONNECTIONS": "64"}, {}, "E010"),
    ({"OMP_NUM_THREADS": "0"}, {}, "E010"),
    ({"NCCL_ASYNC_ERROR_HANDLING": "9"}, {}, "E007 E010"),
    ({"TORCH_NCCL_DUMP_ON_TIMEOUT": "on"}, {}, "E011"),
    ({"TORCH_NCCL_ENABLE_MONITORING": ""}, {}, "E011"),
    ({"NCCL_DEBUG": "DEBUG"}, {}, "E012"),
    ({"NCCL_DEBUG_SUBSYS": "INIT,NETWORK"}, {}, "E012"),
    ({"NCCL_P2P_LEVEL": "nvl"}, {}, "E012"),
    ({"NCCL_NET_GDR_LEVEL": "FAR"}, {}, "E012"),
    ({"TORCH_DISTRIBUTED_DEBUG": "1"}, {}, "E012"),
    ({"LOGLEVEL": "info"}, {}, "E012"),
    ({"NCCL_ALGO": "Ring,Trees"}, {}, "E013 E020"),
    ({"NCCL_ALGO": "ring;tree"}, {}, "E013 E020"),
    ({"NCCL_ALGO": "ring;gather:tree"}, {}, "E013 E020"),
    ({"NCCL_PROTO": "LL256"}, {}, "E013 E020"),
    ({"NCCL_SOCKET_IFNAME": ""}, {}, "E014"),
    ({"GLOO_SOCKET_IFNAME": "eth0,,eth1"}, {}, "E014"),
    ({"NCCL_IB_HCA": "^"}, {}, "E014"),
    ({"NCCL_SOCKET_IFNAME": "lo"}, {}, "E015"),
    ({"GLOO_SOCKET_IFNAME": "docker0"}, {}, "E015"),
    ({"NCCL_SOCKET_IFNAME": "lo"}, {"nodes": 1}, ""),
    ({"NCCL_SOCKET_IFNAME": "^docker0"}, {}, "E016"),
    ({"NCCL_SOCKET_IFNAME": "^docker0"}, {"nodes": 1}, ""),
    ({"GLOO_SOCKET_IFNAME": "^docker0"}, {}, "E017"),
    ({"TP_SOCKET_IFNAME": "=eth0"}, {}, "E017"),
    ({"TP_SOCKET_IFNAME": "eth0,eth1"}, {}, "E017"),
    ({"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "eth0"}, {}, "E018"),
    ({"NCCL_SOCKET_IFNAME": "=eth1", "GLOO_SOCKET_IFNAME": "eth10"}, {}, "E018"),
    ({"NCCL_SOCKET_IFNAME": "^lo,eth", "TP_SOCKET_IFNAME": "eth0"}, {}, "E018"),
    ({"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "eth0"}, {"nodes": 1}, ""),
    ({"TORCH_NCCL_BLOCKING_WAIT": "1"}, {}, "E019"),
    ({"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}, {}, "E019"),
    ({"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, {}, "E027"),
    ({"NCCL_BLOCKING_WAIT": "1"}, {}, "E007 E019"),
    ({"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}, {}, "E020 E020"),
    ({"NCCL_ALGO": "ring;allreduce:^tree", "NCCL_PROTO": "simple"}, {}, "E020 E020"),
    ({"CUDA_LAUNCH_BLOCKING": "1", "TORCH_NCCL_NAN_CHECK": "1"}, {}, "E020 E020"),
    ({"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_NCCL_DESYNC_DEBUG": "true"}, {}, "E020 E020"),
    ({"NCCL_DEBUG": "INFO"}, {"world": 65}, "E021"),
    ({"NCCL_DEBUG": "INFO"}, {"world": 64}, ""),
    ({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "/runs/%h.%p"}, {"world": 65}, ""),
    ({"NCCL_DEBUG_FILE": "/runs/nccl.log"}, {}, "E022"),
    ({"NCCL_DEBUG_FILE": "/runs/nccl.%p"}, {}, "E022"),
    ({"NCCL_DEBUG_FILE": "/runs/nccl.%p"}, {"nodes": 1, "world": 8}, ""),
    ({"OMP_NUM_THREADS": "33"}, {}, "E023"),
    ({"OMP_NUM_THREADS": "32"}, {}, ""),
    ({"OMP_NUM_THREADS": "33"}, {"cpus_per_task": None}, ""),
    ({"CUDA_VISIBLE_DEVICES": "0,1"}, {}, "E024"),
    ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, {"sharding": 8}, "E025"),
    ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, {"sharding": 2, "mp": 4}, "E025"),
    ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, {"mp": 4}, ""),
    ({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, {"sharding": 8}, ""),
    ({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, {"mp": 4}, "E026"),
    ({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, {"mp": 4, "sharding": 2}, ""),
    ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, {}, "E027"),
    ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, {}, "E027"),
    ({"NCCL_RAS_ENABLE": "0"}, {}, "E028"),
    ({"TORCH_NCCL_ENABLE_MONITORING": "0"}, {}, "E028"),
    ({"NCCL_IB_DISABLE": "1", "NCCL_IB_HCA": "mlx5_0", "NCCL_IB_TIMEOUT": "22"}, {}, "E029"),
    ({"NCCL_OOB_NET_IFNAME": "eth0"}, {}, "E029"),
    ({"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_FR_BUFFER_SIZE": "0"}, {}, "E029"),
    ({"FI_PROVIDER": "tcp", "FI_EFA_FORK_SAFE": "1"}, {}, "E029"),
    ({"TORCH_FR_DUMP_TEMP_FILE": "/tmp/trace_"}, {}, "E030"),
    ({"TORCH_FR_DUMP_TEMP_FILE": "/tmp/trace_"}, {"nodes": 1}, ""),
    ({"NCCL_DEBUG": "WARN", "NCCL_P2P_DISABLE": "1", "TORCH_NCCL_NAN_CHECK": "1"}, {"device": "cpu"}, "E031"),
    ({"CUDA_VISIBLE_DEVICES": ""}, {"device": "cpu"}, ""),
    ({"RANK": "0", "NCCL_DEBUG": "WARN", "GLOO_SOCKET_IFNAME": "=eth0"}, {"device": "cpu"}, "E002 E031 E017"),
]


def rules() -> list[Rule]:
    return [value for value in vars(environ).values() if isinstance(value, Rule)]


@pytest.mark.parametrize("env", CLEAN, ids=lambda env: "+".join(env) or "nothing")
def test_ordinary_settings_are_silent(env: dict[str, str]) -> None:
    """Oracle: settings from clusters' own guides, judged harmless by hand."""
    assert lint(env, JOB) == []


@pytest.mark.parametrize(("env", "special", "codes"), MISTAKES, ids=lambda part: str(part)[:60])
def test_mistakes_are_found(env: dict[str, str], special: dict[str, Any], codes: str) -> None:
    """Oracle: the rule that each mistake was written for, from the sources of NCCL and torch."""
    findings = lint(env, JOB._replace(**special))
    assert [finding.code for finding in findings] == codes.split()


def test_every_rule_has_a_case() -> None:
    """Oracle: the rules that stand in the module; codes are unique and without gaps."""
    codes = [rule.code for rule in rules()]
    assert codes == [f"E{number:03}" for number in range(1, len(codes) + 1)]
    assert {code for _, _, expected in MISTAKES for code in expected.split()} == set(codes)


@pytest.mark.parametrize(("env", "special", "codes"), MISTAKES, ids=lambda part: str(part)[:60])
def test_findings_name_the_variable(env: dict[str, str], special: dict[str, Any], codes: str) -> None:
    """Oracle: a finding's key and value are those of the environment, in its order; all but notices have a hint."""
    findings = lint(env, JOB._replace(**special))
    order = list(env)
    # A secret is not repeated.
    values = [None if finding.code == "E032" else env[finding.key] for finding in findings]
    assert [finding.value for finding in findings] == values
    assert all(finding.place is None for finding in findings)
    assert [order.index(finding.key) for finding in findings] == sorted(order.index(f.key) for f in findings)
    assert all(finding.hint or finding.level == "notice" for finding in findings)


@pytest.mark.parametrize(
    ("env", "message", "hint"),
    [
        ({"NCCL_SOCKET_IFNMAE": "eth0"}, "reads it", "`NCCL_SOCKET_IFNAME`"),
        ({"TORCH_NCCL_HEARTBEAT_TIMEOUT": "9"}, "reads it", "`TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC`"),
        ({"NCCL_MIN_NRING": "4"}, "reads it", "`NCCL_MIN_CTAS`"),
        ({"NCCL_TIMEOUT": "1800"}, "reads it", "`Distributed.timeout_minutes`"),
        ({"NCCL_BLOCKING_WAIT": "0"}, "`TORCH_NCCL_BLOCKING_WAIT`", "rename"),
        ({"NCCL_IB_DISABLE": "true"}, "NCCL reads it as 0", "use 1"),
        ({"NCCL_IB_TIMEOUT": "40"}, "40 is not between 0 and 31", "between 0 and 31"),
        ({"NCCL_BUFFSIZE": "0"}, "0 is not at least 1", "at least 1"),
        ({"NCCL_P2P_LEVEL": "nvl"}, "`nvl`", "`NVL`"),
        ({"NCCL_SOCKET_IFNAME": "^docker0"}, "NCCL may choose `lo`", "`^docker0,lo`"),
        ({"NCCL_DEBUG_FILE": "/runs/nccl.%p"}, "16 processes", "`/runs/nccl.%p.%h`"),
        ({"OMP_NUM_THREADS": "64"}, "64 threads, but the task has 32 CPUs", "use 4 or less"),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, "can hang", "use 3"),
    ],
)
def test_messages_say_what_and_the_smallest_change(env: dict[str, str], message: str, hint: str) -> None:
    """Oracle: the words a user needs, by hand."""
    (finding,) = lint(env, JOB)
    assert message in finding.message
    assert hint in finding.hint


def test_one_notice_for_all_variables_without_effect() -> None:
    """Oracle: on CPUs no variable of NCCL is read, so one notice that names them all is enough."""
    (finding,) = lint({"NCCL_DEBUG": "X", "TORCH_NCCL_NAN_CHECK": "1"}, JOB._replace(device="cpu"))
    assert finding.level == "notice"
    assert "`NCCL_DEBUG`, `TORCH_NCCL_NAN_CHECK`" in finding.message


def test_every_known_name_is_accepted() -> None:
    """Oracle: a name that NCCL or torch reads is neither misspelt nor unknown."""
    env = dict.fromkeys((*environ_names.NCCL, *environ_names.TORCH), "1")
    assert not [finding for finding in lint(env, JOB) if finding.code in ("E004", "E005")]


def test_every_name_in_the_tables_is_known() -> None:
    """Oracle: tables of values, debugging settings and new names speak of variables that exist."""
    tables: list[Any] = [environ_names.INTEGERS, environ_names.BOOLEANS, environ_names.ONE_OF, environ_names.SEVERAL_OF]
    tables += [environ_names.FILTERS, environ_names.FOR_DEBUGGING, environ_names.HANG_FINDERS, environ_names.IFNAMES]
    named = {name for table in tables for name in table} | {
        *environ_names.RENAMED.values(),
        *environ_names.CASE_SENSITIVE,
    }
    others = {
        "CUDA_LAUNCH_BLOCKING",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "OMP_NUM_THREADS",
        "LOGLEVEL",
        "GPTCTL_SHARED_MEMORY",
    }
    assert named - {*environ_names.NCCL, *environ_names.TORCH} == others


def test_name_lists_are_sorted_and_shaped() -> None:
    """Oracle: each list is sorted, has no doubles and no dead names, and holds its own prefixes only."""
    for names, prefix in (
        (environ_names.NCCL, "NCCL_"),
        (environ_names.TORCH, "(TORCH|TORCHELASTIC|GLOO|TP|PYTORCH)_"),
    ):
        assert list(names) == sorted(set(names))
        assert not set(names) & environ_names.DEAD_NAMES.keys()
        assert all(re.fullmatch(f"{prefix}[A-Z0-9_]+", name) for name in names)


def test_only_some_variables_of_gptctl_are_for_users() -> None:
    """Oracle: the list in docs/internals.md."""
    assert not lint({"GPTCTL_SHARED_MEMORY": "0", "GPTCTL_HOME": "/data/records"}, JOB)
    assert [finding.code for finding in lint({"GPTCTL_NODE": "0"}, JOB)] == ["E002"]


def test_the_key_of_checkpoints_is_a_secret() -> None:
    """It is refused in env, and no part of the finding has its value."""
    (finding,) = lint({"GPTCTL_CHECKPOINT_KEY": "k" * 64}, JOB)
    assert finding.code == "E002"
    assert "Launch.secrets.GPTCTL_CHECKPOINT_KEY" in finding.hint
    assert "kkk" not in str(finding.as_json())
