"""Jobs as metrics. Oracle: the parser of Prometheus's own client library."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from gptctl.jobs.prometheus import textfile, write
from trainer.errors import UserError


def job(name: str, state: str, cluster: str = "a800", **progress: Any) -> dict[str, Any]:
    return {"job": name, "state": state, "cluster": cluster, "world_size": 8, "progress": progress or None}


def samples(text: str) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(text)
    return {
        (sample.name, *sorted(f"{k}={v}" for k, v in sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def test_jobs_by_state_and_the_numbers_of_running_ones() -> None:
    rows = [
        job("a", "RUNNING", step=5, loss=2.5, tokens_per_second=100.0),
        job("b", "RUNNING"),
        job("c", "FAILED", step=7),
        job("d", "COMPLETED", "local"),
    ]
    found = samples(textfile(rows, {"a": 0.5, "b": None}, "me", 1000.5))
    assert found["gptctl_jobs", "cluster=a800", "state=RUNNING", "user=me"] == 2
    assert found["gptctl_jobs", "cluster=a800", "state=TIMEOUT", "user=me"] == 0
    assert found["gptctl_jobs", "cluster=local", "state=COMPLETED", "user=me"] == 1
    of_a = ("cluster=a800", "job=a", "user=me")
    assert found[("gptctl_job_goodput", *of_a)] == 0.5
    assert found[("gptctl_job_loss", *of_a)] == 2.5
    assert found[("gptctl_job_tokens_per_second", *of_a)] == 100
    assert found["gptctl_updated_seconds", "user=me"] == 1000.5
    assert [key for key in found if "job=c" in key or ("job=b" in key and key[0] != "gptctl_job_ranks")] == []


@given(st.text(max_size=30), st.text(max_size=30), st.floats())
def test_any_text_stays_in_its_label(name: str, cluster: str, loss: float) -> None:
    found = samples(textfile([job(name, "RUNNING", cluster, loss=loss)], {name: loss}, "me", 1.0))
    assert {key[0] for key in found} <= {
        "gptctl_jobs", "gptctl_job_ranks", "gptctl_job_loss", "gptctl_job_goodput", "gptctl_updated_seconds",
    }  # fmt: skip


def test_the_file_is_replaced_and_can_be_read_by_others(tmp_path: Path) -> None:
    for text in ("first\n", "second\n"):
        file = write(tmp_path, text, "a b/c")
    assert [each.name for each in tmp_path.iterdir()] == ["gptctl-a_b_c.prom"]
    assert file.read_text() == "second\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o644


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot write .*nowhere"):
        write(tmp_path / "nowhere", "x", "me")
