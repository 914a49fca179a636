"""One try to send a message, against real local servers that are slow, refuse, lie or never end. Oracles: what arrived
at the server, and the time that passed."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from gptctl.engine.address_reading import Address, UnusableAddress, read_address, shown_address
from gptctl.engine.addresses import KINDS, kind_of, url_problem
from gptctl.engine.notifications import Message, trial_message
from gptctl.engine.webhook import SendOutcome, request_for, send
from tests import webhooks
from tests.webhooks import Webhook, reply, webhook

HELLO = trial_message("node-1", 1.7e9)
TOKEN = "Tk0123456789abcdef"


@pytest.fixture
def hook() -> Iterator[Webhook]:
    with webhook() as found:
        yield found


def test_a_message_arrives_once_with_its_id(hook: Webhook) -> None:
    assert send(Address("webhook", hook.url), HELLO) == SendOutcome(True, 'HTTP 200: {"ok": true}')
    assert hook.received == [HELLO.as_json()]


@pytest.mark.parametrize(
    ("kind", "body", "is_delivered"),
    [
        ("feishu", b'{"code": 0, "msg": "success", "data": {}}', True),
        ("feishu", b'{"StatusCode": 0, "StatusMessage": "success"}', True),
        ("feishu", b'{"code": 19024, "msg": "Key Words Not Found"}', False),
        ("feishu", b'{"code": 9499, "msg": "Bad Request", "StatusCode": 0}', False),
        ("dingtalk", b'{"errcode": 0, "errmsg": "ok"}', True),
        ("dingtalk", b'{"errcode": 310000, "errmsg": "sign not match"}', False),
        ("dingtalk", b'{"errcode": false}', False),
        ("wecom", b'{"errcode": 0, "errmsg": "ok"}', True),
        ("wecom", b'{"errcode": 93000, "errmsg": "invalid webhook url"}', False),
        ("wecom", b"", False),
        ("slack", b"ok", True),
        ("slack", b"invalid_payload", False),
        ("webhook", b"", True),
        ("webhook", b"thanks", True),
        ("webhook", b'{"code": 200, "message": "success"}', True),
        ("webhook", b'{"status": "ok", "error": null}', True),
        ("webhook", b'{"ok": false, "description": "chat not found"}', False),
        ("webhook", b'{"success": false}', False),
        ("webhook", b'{"code": 903, "msg": "invalid token"}', False),
        ("webhook", b'{"errcode": 1}', False),
        ("webhook", b'{"error": "no such channel"}', False),
        ("webhook", b'{"status": "error"}', False),
        ("webhook", b"<!DOCTYPE html><title>Please log in</title>", False),
    ],
)
def test_a_code_of_an_error_is_no_acknowledgement(hook: Webhook, kind: str, body: bytes, is_delivered: bool) -> None:
    """Each of them comes with status 200. Oracle: the services' own documented answers."""
    hook.answers = [reply(200, body)]
    outcome = send(Address(kind, hook.url), HELLO)
    assert outcome.is_delivered is is_delivered
    assert body.decode()[:15].strip() in outcome.text


@pytest.mark.parametrize("status", [200, 201, 202, 204, 301, 307, 400, 403, 404, 408, 429, 500, 503])
def test_the_status_decides_whether_to_try_again(hook: Webhook, status: int) -> None:
    hook.answers = [reply(status, Location="http://127.0.0.1:1/elsewhere")]
    outcome = send(Address("webhook", hook.url), HELLO)
    assert outcome.is_delivered is (status < 300)
    assert outcome.is_final is (300 <= status < 500 and status not in (408, 429))
    assert len(hook.received) == 1  # no redirect was followed


@pytest.mark.parametrize(
    "answer",
    [
        *(webhooks.silent, webhooks.reset, webhooks.no_http, webhooks.dripping_headers, webhooks.endless_headers),
        *(webhooks.dripping_body, webhooks.endless_body),
    ],
)
def test_a_try_ends_in_time_and_memory(hook: Webhook, answer: Callable[[Any], None]) -> None:
    """Whatever the server does: the body is bounded, and so is the time. Oracle: clock, threads and VmHWM."""
    hook.answers = [answer]
    before, threads, began = peak_memory(), {*threading.enumerate()}, time.monotonic()
    outcome = send(Address("feishu", hook.url), HELLO, limit=0.4)
    assert not outcome.is_delivered
    assert outcome.text
    assert time.monotonic() - began < 1.5
    assert peak_memory() - before < 20 << 10
    # The worker ends, too, once its connection is cut; the server keeps a thread for the request.
    deadline = time.monotonic() + 5
    while [each for each in {*threading.enumerate()} - threads if each.name.endswith("(<lambda>)")]:
        assert time.monotonic() < deadline


def test_the_status_counts_if_the_body_does_not_end(hook: Webhook) -> None:
    """For a server without a code of its own, status 200 has said it all: a repeat would be wrong."""
    hook.answers = [webhooks.dripping_body, webhooks.endless_body]
    outcomes = [send(Address("webhook", hook.url), HELLO, limit=0.8) for _ in range(2)]
    assert [outcome.is_delivered for outcome in outcomes] == [True, True]


def peak_memory() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def test_nobody_listens_or_the_name_is_unknown() -> None:
    refused = send(Address("webhook", webhooks.closed_port()), HELLO)
    assert refused == SendOutcome(False, "Connection refused")
    unknown = send(Address("webhook", "http://no-such-host.invalid/x"), HELLO)
    assert unknown == SendOutcome(False, "cannot resolve the host name")


def test_a_proxy_of_the_environment_is_used(hook: Webhook, monkeypatch: pytest.MonkeyPatch) -> None:
    """On many clusters it is the only way out. Oracle: the request line that the proxy gets."""
    monkeypatch.setenv("http_proxy", hook.url.removesuffix("/hook"))
    monkeypatch.delenv("no_proxy", raising=False)
    assert send(Address("webhook", "http://hooks.example/abc"), HELLO).is_delivered
    assert hook.paths == ["http://hooks.example/abc"]


def test_an_answer_that_repeats_the_url_does_not_leak_it(hook: Webhook) -> None:
    """Oracle: the token is in what the server said, and not in what is shown and recorded."""
    url = f"{hook.url}/{TOKEN}?key=Q{TOKEN}"
    page = f"<p>The requested URL {urlsplit(url).path} was not found{' ' * 20}{'x' * 55}{TOKEN}"
    hook.answers = [reply(404, page.encode())]
    outcome = send(Address("webhook", url, f"S{TOKEN}"), HELLO)
    assert TOKEN[:8] not in outcome.text
    assert "was not found" in outcome.text


def test_bodies_are_those_of_the_services() -> None:
    """Oracle: the forms in the services' documentation; hostile text cannot call people."""
    hostile = Message("j.end.0", "t", '<at user_id="all">x</at> <!channel> & done', {})
    bodies = {kind: json.loads(request_for(Address(kind, "http://h"), hostile, 0).body) for kind in KINDS}
    assert bodies["feishu"] == {"msg_type": "text", "content": {"text": '‹at user_id="all">x‹/at> ‹!channel> & done'}}
    assert bodies["dingtalk"]["msgtype"] == bodies["wecom"]["msgtype"] == "text"
    assert "<" not in bodies["wecom"]["text"]["content"]
    assert bodies["slack"] == {"text": '&lt;at user_id="all"&gt;x&lt;/at&gt; &lt;!channel&gt; &amp; done'}
    assert bodies["webhook"]["id"] == "j.end.0"


def test_signatures_are_those_that_the_services_compute() -> None:
    """Feishu: the key is time and secret, of nothing. DingTalk: the secret is the key, of both. Oracle: hmac itself."""
    now = 1700000000.5
    body = json.loads(request_for(Address("feishu", "https://f/x", "s3cret"), HELLO, now).body)
    mac = hmac.new(b"1700000000\ns3cret", b"", hashlib.sha256).digest()
    assert (body["timestamp"], body["sign"]) == ("1700000000", base64.b64encode(mac).decode())
    url = request_for(Address("dingtalk", "https://d/x?access_token=t", "s3cret"), HELLO, now).url
    query = parse_qs(urlsplit(url).query)
    mac = hmac.new(b"s3cret", b"1700000000500\ns3cret", hashlib.sha256).digest()
    assert query == {
        "access_token": ["t"],
        "timestamp": ["1700000000500"],
        "sign": [base64.b64encode(mac).decode()],
    }


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("https://open.feishu.cn/open-apis/bot/v2/hook/abc", "feishu"),
        ("https://open.larksuite.com/open-apis/bot/v2/hook/abc", "feishu"),
        ("https://oapi.dingtalk.com/robot/send?access_token=abc", "dingtalk"),
        ("https://qyapi.weixin.qq.com/cgi-bin/webhook/send?key=abc", "wecom"),
        ("https://hooks.slack.com/services/T0/B0/abc", "slack"),
        ("https://example.org/?next=https://hooks.slack.com/", "webhook"),
        ("https://user:hooks.slack.com@example.org:8443/x", "webhook"),
        ("tgram://123456:token/chat", "apprise"),
        ("mailto://me:secret@example.org", "apprise"),
    ],
)
def test_the_kind_follows_from_the_url(url: str, kind: str) -> None:
    assert kind_of(url) == kind
    assert url_problem(url, "") == ""
    assert "secret" not in shown_address(kind, url)
    assert "abc" not in shown_address(kind, url)


@pytest.mark.parametrize(
    "url",
    [
        *("", "example.org/hook", "https://", "https:///x", "http://h:99999/", "http://[::1/x", "http://h/a b"),
        *("http://h/ü", "http://h/\nx", "ftp://h/x", "file:///etc/passwd", "javascript:alert(1)"),
    ],
)
def test_what_is_no_url(url: str) -> None:
    kind = "webhook" if url.startswith(("ftp", "file")) else ""
    assert url_problem(url, kind)


def test_addresses_are_read_where_they_are_named(tmp_path: Path) -> None:
    """And what cannot be read is named, but not shown. A FIFO does not block."""
    (tmp_path / "url").write_text(f"https://open.feishu.cn/{TOKEN}\n")
    (tmp_path / "bad").write_text(f"not a url {TOKEN}")
    (tmp_path / "empty").write_text("\n")
    os.mkfifo(tmp_path / "fifo")
    found = read_address({"kind": "", "url": {"file": str(tmp_path / "url")}, "secret": {"env": "S"}}, {"S": "s"})
    assert found == Address("feishu", f"https://open.feishu.cn/{TOKEN}", "s")
    for source, words in (
        ({"env": "UNSET"}, "the variable UNSET is not set, or empty"),
        ({"file": str(tmp_path / "empty")}, "is not set, or empty"),
        ({"file": str(tmp_path / "none")}, "No such file"),
        ({"file": str(tmp_path / "fifo")}, "not a regular file"),
        ({"file": str(tmp_path)}, "a folder"),
        ({"file": str(tmp_path / "bad")}, "cannot be used"),
    ):
        with pytest.raises(UnusableAddress, match=words) as raised:
            read_address({"kind": "", "url": source}, {})
        assert TOKEN not in str(raised.value)
