"""Where messages about a job go: kinds of addresses, and their URLs and events.

Small: every command that reads a config imports it. `address_reading.py` reads references.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

WEBHOOK, FEISHU, DINGTALK, WECOM = "webhook", "feishu", "dingtalk", "wecom"
SLACK, APPRISE = "slack", "apprise"
KINDS = (WEBHOOK, FEISHU, DINGTALK, WECOM, SLACK, APPRISE)
START, FIRST_STEP, FAILURE, END = "start", "first_step", "failure", "end"
TOLD = (START, FIRST_STEP, FAILURE, END)  # the events that an address can choose from
SIGNED = (FEISHU, DINGTALK)  # their robots can demand a signature
_HOSTS = {
    "open.feishu.cn": FEISHU,
    "open.larksuite.com": FEISHU,
    "oapi.dingtalk.com": DINGTALK,
    "qyapi.weixin.qq.com": WECOM,
    "hooks.slack.com": SLACK,
}


def url_problem(url: str, kind: str) -> str:
    """Say what is wrong with a URL, without repeating it; empty if it can be used."""
    # Not compiled at import: most commands read no URL.
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[!-~]+", url, re.IGNORECASE):
        return "it is not a URL such as https://HOST/PATH, or has blanks or non-ASCII characters"
    if (kind or kind_of(url)) == APPRISE:
        return ""  # apprise has its own forms, which it checks itself
    if not url.lower().startswith(("http://", "https://")):
        return "it is not an http or https URL"
    try:
        parts = urlsplit(url)
        has_host = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        has_host = False
    return "" if has_host else "its host or port is missing or invalid"


def kind_of(url: str) -> str:
    """The kind of an address whose kind is not set."""
    # Where a URL of apprise begins with https, it is that of a service that is known here, too.
    scheme, _, rest = url.partition("://")
    if scheme.lower() not in ("http", "https"):
        return APPRISE
    host = re.split(r"[/?#]", rest)[0].rpartition("@")[2].partition(":")[0]
    return _HOSTS.get(host.lower(), WEBHOOK)
