"""What is recorded of a run, for comparisons: values with their origins, by section and source.

A source is a file of the run. It may be missing: an older gptctl or a script did not write it, or
the folder was removed. Then nothing that it would tell can be compared.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gptctl.engine.file_reading import read_json
from gptctl.engine.run_folder import RunFolder
from gptctl.jobs.code_differences import code_digests
from gptctl.jobs.config_differences import secret_reference, world_text
from gptctl.jobs.history import History
from gptctl.jobs.job_status import origins
from gptctl.jobs.store import JobRecord
from gptctl.jobs.written_config import CODE_PATHS
from gptctl.text import count, size_text
from trainer.checkpoint_names import ENVIRONMENT
from trainer.secret_names import looks_secret

LARGEST_ENVIRONMENT = 1 << 20  # bytes; a hundred packages have four thousand
MOST_ATTEMPTS = 100  # whose folders are searched, the newest first
ENV = "Launch.env."
HIDDEN = "(hidden)"
# Config keys that are shown in other sections, by the start of their names.
IN_SECTIONS = {
    "Distributed.": "layout",
    "Launch.nodes": "layout",
    "Launch.gpus_per_node": "layout",
    "Launch.devices": "layout",
    "Launch.style": "layout",
    "Launch.rdzv.": "layout",
    "Launch.slurm.": "nodes",
    ENV: "environment",
}
# Where a rerun takes profile and code from; what is in them is compared.
PLACES = ("Launch.cluster", *CODE_PATHS)
# Of a profile: what is compared elsewhere, or names it only.
NOT_OF_PROFILE = ("name", "kind", "env", "hosts")
SECTIONS = ("config", "code", "environment", "packages", "layout", "nodes", "data")


class Value(NamedTuple):
    """A value, where it came from, and the text by which it is compared with another one."""

    value: Any
    origin: str
    compared: str


Values = dict[str, Value]
# Section -> source -> its values; None: the run has no such file.
Facts = dict[str, dict[str, Values | None]]


def job_facts(record: JobRecord) -> Facts:
    """Read what is recorded of a job in its folder."""
    folder, job = record.run_folder, record.id
    config = _by_section(record)
    profile, plan, git = (read_json(folder / f"{name}.json") for name in ("cluster", "plan", "git"))
    machines = {"world": world_text(record.nodes, record.per_node)}
    cluster = {"cluster": record.cluster, "kind": record.kind}
    environment = _newest_environment(record)
    facts: Facts = {
        "config": {"config.json": config.get("config") if config else None},
        "code": {"code": _values(code_digests(folder / "code"), job)},
        "environment": {
            "config.json": config.get("environment", {}) if config else None,
            "plan.json": _values({"interpreter": plan.get("python")} if plan else None, job),
            "cluster.json": _values(_profile(profile), job),
        },
        "layout": {
            "record": _values(machines, job),
            "config.json": config.get("layout") if config else None,
        },
        "nodes": {
            "record": _values(cluster, job),
            "hosts": _values(_hosts(record, environment), job),
            "config.json": config.get("nodes") if config else None,
        },
    }
    facts["code"]["git.json"] = _values(_git(git), job)
    facts["code"]["templates"] = _values(_templates(folder), job)
    return with_environment(facts, environment, job)


def file_facts(file: Path) -> Facts:
    """What is recorded beside a metrics.jsonl of a run that gptctl did not start."""
    environment = read_json(file.parent / ENVIRONMENT, LARGEST_ENVIRONMENT)
    return with_environment({}, environment, "")


def with_environment(facts: Facts, found: Mapping[str, Any] | None, job: str) -> Facts:
    """Add what the trainer recorded at its start."""
    parts = {
        "environment": _part(found, "software"),
        "packages": _part(found, "packages"),
        "nodes": _node(_part(found, "node")),
        "data": _data(_part(found, "data")),
    }
    own = {name: facts.get(name, {}) for name in SECTIONS}
    for section, values in parts.items():
        own[section][ENVIRONMENT] = _values(None if found is None else values, job)
    if (recorded := own["environment"][ENVIRONMENT]) is not None:
        for name, value in _part(found, "variables").items():
            recorded[name] = _variable(name, value, "", job)
    return own


def _newest_environment(record: JobRecord) -> dict[str, Any] | None:
    """What the newest attempt recorded that came so far."""
    folder = RunFolder(record.local_dir)
    attempts = folder.attempts()
    for attempt in range(attempts - 1, max(-1, attempts - 1 - MOST_ATTEMPTS), -1):
        file = folder.attempt(attempt) / ENVIRONMENT
        if found := read_json(file, LARGEST_ENVIRONMENT):
            return found
    return None


def _values(found: Mapping[str, Any] | None, job: str) -> Values | None:
    if found is None:
        return None
    return {name: _value(value, "", job) for name, value in found.items()}


def _value(value: Any, origin: str, job: str) -> Value:
    """A value as it is compared: where a job has its own folder is not a difference."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return Value(value, origin, text.replace(job, "<job>") if job else text)


def _variable(name: str, value: Any, origin: str, job: str) -> Value:
    """A variable; the value of one that may be a secret is compared, but never shown."""
    found = _value(value, origin, job)
    return found._replace(value=HIDDEN) if looks_secret(name) else found


def _by_section(record: JobRecord) -> dict[str, Values] | None:
    """The keys of a job's config by section; None if nothing of it is left."""
    found: dict[str, Values] = {name: {} for name in ("config", *IN_SECTIONS.values())}
    rows = origins(record, "")
    for key, value, origin in rows:
        if key in PLACES:
            continue
        section = next((to for start, to in IN_SECTIONS.items() if key.startswith(start)), "config")
        if key.startswith(ENV):
            # By its own name, as among the variables that the trainer recorded.
            name = key.removeprefix(ENV)
            found[section][name] = _variable(name, value, origin, record.id)
            continue
        for name, each in _spread(key, value):
            found[section][name] = _value(each, origin, record.id)
    return found if rows else None


def _spread(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A key with its value; of secrets only where each of them is read from."""
    if key != "Launch.secrets" or not isinstance(value, dict):
        yield key, value
        return
    for name, source in value.items():
        yield f"{key}.{name}", secret_reference(source)


def _profile(profile: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if profile is None:
        return None
    return {
        f"profile.{name}": value for name, value in profile.items() if name not in NOT_OF_PROFILE
    }


def _hosts(record: JobRecord, environment: Mapping[str, Any] | None) -> dict[str, Any] | None:
    folder = RunFolder(record.local_dir)
    hosts: Any = folder.hosts(folder.attempts() - 1)
    # A local job has no list of hosts. Of a removed folder the history tells what is left.
    hosts = hosts or [*filter(None, [_part(environment, "node").get("host")])]
    hosts = hosts or [*History().facts(record).get("hosts", ())]
    return {"hosts": hosts} if hosts else None


def _git(git: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Commit and branch, and how much is not committed. Outside of a repository: nothing."""
    if git is None:
        return None
    found = {f"git {name}": git[name] for name in ("commit", "branch") if name in git}
    diff = git.get("diff")
    if isinstance(diff, str) and diff:
        digest = hashlib.sha256(diff.encode(errors="replace")).hexdigest()
        found["git diff"] = f"{count(len(diff), 'character')}, sha256 {digest[:12]}"
    return found


def _templates(folder: Path) -> dict[str, Any] | None:
    found = code_digests(folder / "templates")
    return None if found is None else {f"templates/{name}": text for name, text in found.items()}


def _part(found: Mapping[str, Any] | None, name: str) -> dict[str, Any]:
    # A damaged file can have anything here.
    part = (found or {}).get(name)
    return part if isinstance(part, dict) else {}


def _node(node: dict[str, Any]) -> dict[str, Any]:
    memory = node.get("memory")
    named = {name: value for name, value in node.items() if name not in ("host", "memory")}
    if isinstance(memory, int):
        named["memory"] = size_text(memory)  # rounded: two equal nodes differ by some bytes
    return {f"first rank: {name}": value for name, value in named.items()}


def _data(data: dict[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in data.items() if name not in ("digests", "files")}
    found |= {f"{name} digest": value for name, value in _part(data, "digests").items()}
    files = data.get("files")
    for file in files if isinstance(files, list) else ():
        if isinstance(file, dict):
            facts = {name: value for name, value in file.items() if name != "name"}
            found[f"file {os.path.basename(str(file.get('name')))}"] = facts
    return found
