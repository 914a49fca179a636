"""A real browser without a window, driven through Debian's chromedriver by its HTTP interface (W3C WebDriver)."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
LACKING = [name for name, path in (("chromium", CHROMIUM), ("chromedriver", DRIVER)) if not path]
# The browser must not try to reach its maker: only what the page asks for may be seen.
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync --hide-scrollbars --disable-dev-shm-usage""".split()


class Page:
    def __init__(self, address: str, session: str) -> None:
        self._base = f"{address}/session/{session}"

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return call(method, f"{self._base}/{path}", body)

    def open(self, url: str) -> None:
        self._call("POST", "url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that a function body returns."""
        return self._call("POST", "execute/sync", {"script": script, "args": list(arguments)})

    def messages(self) -> list[str]:
        """What the console said since the last call: errors, refused requests, violations of the policy."""
        return [entry["message"] for entry in self._call("POST", "se/log", {"type": "browser"})]

    def save_picture(self, file: Path) -> None:
        """The whole page, as wide as the window."""
        size = self.run("return [document.documentElement.scrollWidth, document.documentElement.scrollHeight]")
        shot = {"width": size[0], "height": size[1], "x": 0, "y": 0, "scale": 1}
        arguments = {"captureBeyondViewport": True, "clip": shot}
        found = self._call("POST", "goog/cdp/execute", {"cmd": "Page.captureScreenshot", "params": arguments})
        file.write_bytes(base64.b64decode(found["data"]))

    def drag(self, selector: str, start: float, end: float) -> None:
        """Press the mouse over an element, move it from one part of its width to another, and let go."""
        box = self.run(
            "const e = document.querySelector(arguments[0]); e.scrollIntoView({block: 'center'});"
            "const b = e.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]",
            selector,
        )
        y = round(box[1] + box[3] / 2)
        places = [round(box[0] + box[2] * part) for part in (start, (start + end) / 2, end)]
        moves = [{"type": "pointerMove", "duration": 0, "x": x, "y": y} for x in places]
        actions = [moves[0], {"type": "pointerDown", "button": 0}, *moves[1:], {"type": "pointerUp", "button": 0}]
        mouse = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": actions}
        self._call("POST", "actions", {"actions": [mouse]})

    def hover(self, selector: str, part: float) -> None:
        box = self.run(
            "const e = document.querySelector(arguments[0]); e.scrollIntoView({block: 'center'});"
            "const b = e.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]",
            selector,
        )
        x, y = round(box[0] + box[2] * part), round(box[1] + box[3] / 2)
        moves = [{"type": "pointerMove", "duration": 0, "x": x, "y": y}]
        mouse = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": moves}
        self._call("POST", "actions", {"actions": [mouse]})


def call(method: str, url: str, body: Mapping[str, Any] | None = None) -> Any:
    data = None if method != "POST" else json.dumps(body or {}).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    # Not through a proxy: the driver is on this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as answer:
        return json.load(answer)["value"]


@contextmanager
def chromedriver(folder: Path) -> Iterator[str]:
    """The address of a driver that ends, with its browsers, when the block does."""
    assert DRIVER
    with subprocess.Popen(
        [DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder,
        env={**os.environ, "TMPDIR": str(folder), "HOME": str(folder)}, text=True, start_new_session=True,
    ) as driver:  # fmt: skip
        try:
            yield f"http://127.0.0.1:{_port_of(driver)}"
        finally:
            driver.terminate()


def _port_of(driver: subprocess.Popen[str]) -> int:
    assert driver.stdout
    for line in driver.stdout:
        if "started successfully on port" in line:
            return int(line.split("port ")[1].strip(" .\n"))
    raise AssertionError("chromedriver did not start")


@contextmanager
def browser_page(driver: str, folder: Path, width: int = 1280, is_phone: bool = False) -> Iterator[Page]:
    profile = folder / f"profile-{time.monotonic_ns()}"
    options: dict[str, Any] = {
        "binary": CHROMIUM,
        "args": [*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},900"],
    }
    if is_phone:
        metrics = {"width": width, "height": 800, "pixelRatio": 2.0, "touch": True}
        options["mobileEmulation"] = {"deviceMetrics": metrics}
    wanted = {"browserName": "chrome", "goog:loggingPrefs": {"browser": "ALL"}, "goog:chromeOptions": options}
    session = call("POST", f"{driver}/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
    try:
        yield Page(driver, session)
    finally:
        call("DELETE", f"{driver}/session/{session}")
