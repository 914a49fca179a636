"""`notify` of configs, profiles and GPTCTL_NOTIFY. Oracles: what the plan of the job has, and the findings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gptctl.engine.contract import NOTIFY_VARIABLE
from gptctl.engine.launch_plan import LaunchPlan
from gptctl.planning.build import JobIdentity, Site, build_plan
from gptctl.remote.archive import secrets_of
from gptctl.spec.check import Checked, check_config
from gptctl.spec.machine_rules import check_addresses_here, check_apprise_here
from gptctl.spec.summary import as_json
from tests.conftest import codes

ALL = ("start", "first_step", "failure", "end")
SLACK = "https://hooks.slack.com/services/T000/B000/XXXXXXXXXXXX"
SITE = Site("/here", "python", "/trainer")


def targets(checked: Checked) -> list[dict[str, Any]]:
    assert checked.is_valid, checked.findings
    return [dict(target) for target in checked.launch.notify or ()]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://10.0.0.1:8080/hook", [{"kind": "webhook", "url": "http://10.0.0.1:8080/hook", "on": ALL}]),
        ("{env: HOOK}", [{"kind": "", "url": {"env": "HOOK"}, "on": ALL}]),
        ("{env: HOOK, kind: wecom}", [{"kind": "wecom", "url": {"env": "HOOK"}, "on": ALL}]),
        ("{file: ~/.hook}", [{"kind": "", "url": {"file": "~/.hook"}, "on": ALL}]),
        ("{url: {env: H}, kind: Feishu, on: end}", [{"kind": "feishu", "url": {"env": "H"}, "on": ("end",)}]),
        (
            "{url: {env: H}, kind: dingtalk, secret: {env: S}, on: [restart, first step, failure]}",
            [{"kind": "dingtalk", "url": {"env": "H"}, "on": ("failure", "first_step"), "secret": {"env": "S"}}],
        ),
        ("[{env: A}, {url: {env: B}, on: [start, end]}]", [
            {"kind": "", "url": {"env": "A"}, "on": ALL}, {"kind": "", "url": {"env": "B"}, "on": ("start", "end")}]),
        ("off", []),
        ("[]", []),
        ("", []),
    ],
)  # fmt: skip
def test_forms(check, text: str, expected: list[dict[str, Any]]) -> None:
    """And what is written to config.json gives the same again: a rerun reads it."""
    checked = check(f"Launch:\n  notify: {text}\n")
    assert targets(checked) == expected
    frozen = json.loads(json.dumps(as_json(checked, with_config=True)))["resolved"]["Launch"]["notify"]
    again = check(json.dumps({"Launch": {"notify": frozen}}))
    assert targets(again) == expected


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("example.org/hook?t=SECRET", "C014", "it is not a URL"),
        ("http://h:99999/SECRET", "C014", "port"),
        ("{url: 'ftp://h/SECRET', kind: webhook}", "C014", "not an http or https URL"),
        ("{url: {env: H}, kind: feishuu}", "C013", "did you mean feishu?"),
        ("{url: {env: H}, on: [end, finish]}", "C013", "first_step"),
        ("{urll: 'https://h/SECRET'}", "C011", "did you mean url?"),
        ("{on: [end]}", "C011", "the key url is missing"),
        ("{url: 'https://h/SECRET', env: B}", "C011", "notify has no key env"),
        ("{url: {env: 'a b'}}", "C014", "variable name"),
        ("{url: {env: A, file: B}}", "C011", "must be a reference"),
        ("{url: {env: H}, kind: slack, secret: {env: S}}", "C011", "feishu and dingtalk"),
        ("{url: {env: H}, secret: SECRET}", "C011", "must be a reference"),
        ("{url: [https://h/SECRET]}", "C011", "found a list"),
    ],
)
def test_mistakes_name_the_rule_and_never_the_secret(check, text: str, code: str, words: str) -> None:
    checked = check(f"Launch:\n  notify: {text}\n")
    (finding,) = checked.findings
    assert finding.code == code
    assert finding.key.startswith("Launch.notify")
    assert finding.place
    assert finding.place.line == 2
    assert words in f"{finding.message} {finding.hint}"
    assert "SECRET" not in json.dumps(finding.as_json())


@pytest.mark.parametrize(
    ("url", "has_token"),
    [
        (SLACK, True),
        ("https://example.org/hook?key=1", True),
        ("https://me:pass@example.org/hook", True),
        ("https://example.org/api/0123456789abcdef0123", True),
        ("mailto://me:pass@example.org", True),
        ("http://10.0.0.1:8080/hook", False),
        ("https://notifications.example.org/teams/training/gptctl-notifications", False),
    ],
)
def test_a_written_token_is_a_warning(check, url: str, has_token: bool) -> None:
    checked = check(f"Launch:\n  notify: {url}\n")
    assert codes(checked) == (["A016"] if has_token else [])
    assert all(finding.level == "warning" and url not in str(finding) for finding in checked.findings)


def test_the_config_beats_the_variable_which_beats_the_profile(check, tmp_path: Path, monkeypatch) -> None:
    """The usual origins; `off` in one of them is a choice. Oracle: the origin that `gptctl show` prints."""
    (tmp_path / "mine.yaml").write_text("kind: local\nnotify: {env: OF_PROFILE}\n")
    text = f"Launch:\n  cluster: {tmp_path}/mine.yaml\n"

    def found(text: str, *overrides: str) -> tuple[list[Any], str]:
        checked = check(text, *overrides)
        return [target["url"] for target in targets(checked)], checked.launch_origins["Launch.notify"]

    assert found(text) == ([{"env": "OF_PROFILE"}], "profile mine")
    monkeypatch.setenv(NOTIFY_VARIABLE, SLACK)
    assert found(text) == ([{"env": NOTIFY_VARIABLE}], NOTIFY_VARIABLE)
    urls, origin = found(f"{text}  notify: {{env: OF_CONFIG}}\n")
    assert (urls, origin.endswith("run.yaml:3")) == ([{"env": "OF_CONFIG"}], True)
    override = "Launch.notify=off"
    assert found(f"{text}  notify: {{env: OF_CONFIG}}\n", override) == ([], f"-o {override}")
    monkeypatch.setenv(NOTIFY_VARIABLE, "off")
    assert found(text) == ([], NOTIFY_VARIABLE)


def test_a_url_in_the_variable_is_not_copied(check, monkeypatch) -> None:
    """It is the reference that is stored. A mapping may be there, too, and mistakes in it are found."""
    monkeypatch.setenv(NOTIFY_VARIABLE, SLACK)
    checked = check("Global: {seed: 1}\n")
    assert SLACK not in json.dumps(as_json(checked, with_config=True))
    assert targets(checked) == [{"kind": "slack", "url": {"env": NOTIFY_VARIABLE}, "on": ALL}]
    monkeypatch.setenv(NOTIFY_VARIABLE, "{url: {env: H}, on: [end]}")
    assert targets(check("Global: {seed: 1}\n"))[0]["on"] == ("end",)
    for wrong in ("example.org/SECRET", "{url: {env: H}, on: [never]}", "[", "{urls: SECRET}"):
        monkeypatch.setenv(NOTIFY_VARIABLE, wrong)
        checked = check("Global: {seed: 1}\n")
        assert not checked.is_valid, wrong
        assert NOTIFY_VARIABLE in str(checked.findings[0])
        assert "SECRET" not in json.dumps([finding.as_json() for finding in checked.findings])


def test_a_profile_is_checked_like_a_config(check, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"kind: local\nnotify: {SLACK}\n")
    checked = check(f"Launch: {{cluster: {tmp_path}/mine.yaml}}\n")
    assert [(finding.code, finding.key) for finding in checked.findings] == [("A016", "notify")]


def plan_of(checked: Checked) -> LaunchPlan:
    return build_plan(checked, SITE, JobIdentity("gpt-1", "/runs/gpt-1"))


def test_the_plan_has_absolute_paths_and_survives_json(check) -> None:
    plan = plan_of(check("Launch: {notify: {url: {file: hook.txt}, kind: dingtalk, secret: {file: ../s}, on: end}}\n"))
    (target,) = plan.notify
    assert (target["url"], target["secret"]) == ({"file": "/here/hook.txt"}, {"file": "/s"})
    again = LaunchPlan.from_json(json.loads(json.dumps(plan.as_json())))
    assert again.notify[0]["url"] == target["url"]
    assert LaunchPlan.from_json({k: v for k, v in plan.as_json().items() if k != "notify"}).notify == ()


def test_named_variables_are_sent_to_other_machines(check, monkeypatch) -> None:
    """As those of Launch.secrets are: over stdin. Oracle: what is packed for a host."""
    for name in ("HOOK", "SIGN", "TOKEN"):
        monkeypatch.setenv(name, name.lower())
    text = "Launch:\n  secrets: {T: {env: TOKEN}}\n  notify: {url: {env: HOOK}, kind: feishu, secret: {env: SIGN}}\n"
    assert secrets_of(plan_of(check(text))) == {"TOKEN": "token", "HOOK": "hook", "SIGN": "sign"}


def test_a_task_notifies_nobody(check, monkeypatch) -> None:
    monkeypatch.setenv(NOTIFY_VARIABLE, SLACK)
    assert plan_of(check("Launch: {entrypoint: -m trainer.tasks.evaluate}\n")).notify == ()


def test_what_this_machine_lacks(check, monkeypatch) -> None:
    """apprise, and references. Warnings: a job runs without its messages."""
    mail = check("Launch: {notify: {env: MAIL}}\n")
    monkeypatch.setenv("MAIL", "mailto://me:secret@example.org")
    assert [*check_apprise_here(mail)] == []  # it is installed for the tests
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (lacking,) = check_apprise_here(mail)
    assert (lacking.code, lacking.level, lacking.hint) == ("S032", "warning", "pip install 'gptctl[notify]'")
    assert [*check_addresses_here(mail.launch.notify or ())] == []
    monkeypatch.delenv("MAIL")
    (unset,) = check_addresses_here(mail.launch.notify or ())
    assert (unset.code, unset.level, unset.message) == ("S033", "warning", "the variable MAIL is not set, or empty")


def test_reading_a_config_loads_no_http_client() -> None:
    """Every command reads configs, and few send messages. Oracle: the modules of a fresh interpreter."""
    from tests.unit.test_architecture import loaded_by

    program = "from gptctl.spec.check import *\ncheck_config(Path('templates/configs/dp8.yaml'), [])"
    assert not {
        "http.client",
        "ssl",
        "urllib.request",
        "hmac",
        "gptctl.engine.webhook",
        "gptctl.engine.notifications",
    } & loaded_by(program)


def test_check_config_needs_no_file(monkeypatch) -> None:
    monkeypatch.setenv(NOTIFY_VARIABLE, SLACK)
    assert targets(check_config(None, []))
