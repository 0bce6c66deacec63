"""A headless Chromium, controlled through its debugging pipe; no package is needed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next((path for name in ("chromium", "chromium-browser") if (path := shutil.which(name))), None)

SECONDS = 300.0
"""Timeout of every wait."""


def needs_chromium(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that opens a browser."""
    missing = pytest.mark.skipif(CHROMIUM is None, reason="no chromium (apt-get install chromium)")
    return pytest.mark.browser(missing(test))


class Page:
    """One page, with its console messages, errors and network requests."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.messages: list[str] = []
        self.requests: list[str] = []

    def attach(self) -> None:
        """Create the page and enable its events."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            # The pipe does not block, so that a silent browser cannot hang the test.
            deadline = time.monotonic() + SECONDS
            while True:
                try:
                    read = os.read(self._read, 1 << 20)
                    break
                except BlockingIOError:
                    assert time.monotonic() < deadline, "the browser does not answer"
                    time.sleep(0.01)
            assert read, "the browser has ended"
            self._buffer += read
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._note(message)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        method, parameters = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.messages.append(json.dumps(parameters["exceptionDetails"])[:500])
        elif method == "Runtime.consoleAPICalled":
            text = " ".join(str(argument.get("value")) for argument in parameters["args"])
            self.messages.append(f"{parameters['type']}: {text}")
        elif method == "Log.entryAdded":
            self.messages.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])

    def open(self, file: Path, *, width: int = 1280, height: int = 900) -> None:
        """Load a page in a window of this size, and wait until its root has `data-ready="yes"`."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.call("Page.navigate", url=file.absolute().as_uri())
        deadline = time.monotonic() + SECONDS
        while self.value("document.documentElement?.dataset.ready") != "yes":
            assert time.monotonic() < deadline, f"the page is not ready: {self.messages}"
            time.sleep(0.05)

    def value(self, expression: str) -> Any:
        """Value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def print(self, file: Path) -> None:
        """Write the printed page as PDF."""
        file.write_bytes(base64.b64decode(self.call("Page.printToPDF", printBackground=False)["data"]))


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A page in a new browser, which is closed at the end of the block.

    Args:
        profile: empty folder for the browser's profile.
    """
    assert CHROMIUM is not None
    to_browser, from_browser = os.pipe(), os.pipe()
    os.set_blocking(from_browser[0], False)
    options = [
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe"),
        *("--disable-breakpad", f"--user-data-dir={profile}"),
    ]
    # The browser reads commands from descriptor 3 and answers on 4.
    shell = 'read_end=$1; write_end=$2; shift 2; exec "$@" 3<&"$read_end" 4>&"$write_end"'
    ends = (to_browser[0], from_browser[1])
    process = subprocess.Popen(
        ["bash", "-c", shell, "bash", *map(str, ends), CHROMIUM, *options],
        pass_fds=ends,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    for end in ends:
        os.close(end)
    page = Page(to_browser[1], from_browser[0])
    try:
        page.attach()
        yield page
    finally:
        # Closing its pipe ends the browser and all its processes.
        os.close(to_browser[1])
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(from_browser[0])
