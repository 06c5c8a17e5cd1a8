"""A headless Chromium, controlled by its own protocol: JSON over two pipes, each message ended by a zero byte."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import signal
import tempfile
from contextlib import suppress
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars"),
]


#: Messages of the protocol about what a page writes to its console.
CONSOLE = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")


class Chromium:
    """One page of a browser with a new profile. A context manager."""

    #: What the page has written to its console, if ``watch_console()`` was called.
    console: list[dict[str, Any]]

    def __enter__(self) -> Chromium:
        self._folder = tempfile.mkdtemp(prefix="chromium-")
        (theirs_in, ours_out), (ours_in, theirs_out) = _pipe(), _pipe()
        quiet = os.open(os.devnull, os.O_RDWR)
        # It reads messages from descriptor 3 and writes its own to 4.
        self._process = os.posix_spawn(
            str(PROGRAM),
            [str(PROGRAM), *OPTIONS, "--remote-debugging-pipe", f"--user-data-dir={self._folder}", "about:blank"],
            os.environ,
            file_actions=[
                *((os.POSIX_SPAWN_DUP2, quiet, standard) for standard in (0, 1, 2)),
                (os.POSIX_SPAWN_DUP2, theirs_in, 3),
                (os.POSIX_SPAWN_DUP2, theirs_out, 4),
            ],
            setpgroup=0,
        )
        for descriptor in (theirs_in, theirs_out, quiet):
            os.close(descriptor)
        self._in, self._out = os.fdopen(ours_in, "rb"), os.fdopen(ours_out, "wb")
        self._number, self._rest, self._context = 0, b"", ""
        self.begin_anew()
        return self

    def begin_anew(self) -> None:
        """Open a page in a new profile, without cookies."""
        self._session, self._loaded, self._passed, self.console = "", 0, False, []
        if self._context:
            self.do("Target.disposeBrowserContext", browserContextId=self._context)
        self._context = self.do("Target.createBrowserContext")["browserContextId"]
        page = self.do("Target.createTarget", url="about:blank", browserContextId=self._context)["targetId"]
        self._session = self.do("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        self.do("Page.enable")
        while self.evaluate("document.readyState") != "complete":
            pass

    def watch_console(self) -> None:
        """Note what pages write to their consoles from here on."""
        self.do("Log.enable")
        self.do("Runtime.enable")

    def let_time_pass(self, seconds: float) -> None:
        """Run the timers of the page that are due in so many seconds, without waiting for so long."""
        self._passed = False
        budget = {"policy": "pauseIfNetworkFetchesPending", "budget": 1000 * seconds}
        self.do("Emulation.setVirtualTimePolicy", **budget)
        while not self._passed:
            self._next()

    def __exit__(self, *exception: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        for pipe in (self._in, self._out):
            with suppress(BrokenPipeError):
                pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def do(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result. Raises ``RuntimeError`` with what the browser says."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        self._out.flush()
        while (answer := self._next()).get("id") != self._number:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return dict(answer["result"])

    def open(self, url: str) -> None:
        """Open a page and wait until all of it is loaded."""
        before = self._loaded
        self.do("Page.navigate", url=url)
        self._await_page_after(before)

    def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression on the page; of a promise, its result."""
        answer = self.do("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def submit(self, **fields: str) -> None:
        """Fill in the fields of the form that has them, send it, and wait for the page that answers."""
        script = f"""
            const fields = {json.dumps(fields)}, first = document.querySelector(`[name=${{Object.keys(fields)[0]}}]`)
            for (const [name, value] of Object.entries(fields)) first.form.elements[name].value = value
            first.form.requestSubmit()
        """
        self._follow(script)

    def click(self, selector: str) -> None:
        """Click the first element that a CSS selector finds, and wait for the page to which it leads."""
        self._follow(f"document.querySelector({json.dumps(selector)}).click()")

    @property
    def text(self) -> str:
        """What a reader sees of the page."""
        return str(self.evaluate("document.body.innerText"))

    def show(self, *, width: int, height: int, dark: bool) -> None:
        """Show pages on a screen of this size, in pixels, with the preference for light or dark."""
        self.do("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.do("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self) -> bytes:
        """Return what the screen shows as PNG."""
        return base64.b64decode(self.do("Page.captureScreenshot", format="png")["data"])

    def _follow(self, script: str) -> None:
        """Run a script that leads to another page, and wait for that page."""
        before = self._loaded
        self.evaluate(script)
        self._await_page_after(before)

    def _await_page_after(self, before: int) -> None:
        """Wait until one more page has been loaded. It may be loaded before the call that began it has an answer."""
        while self._loaded == before:
            self._next()

    def _next(self) -> dict[str, Any]:
        """Return the next message. Count the pages that are loaded, and note what they write to the console."""
        while b"\0" not in self._rest:
            chunk = self._in.read1(1 << 16)
            if not chunk:
                raise RuntimeError("Chromium has ended.")
            self._rest += chunk
        said, _, self._rest = self._rest.partition(b"\0")
        message = dict(json.loads(said))
        method = message.get("method")
        self._loaded += method == "Page.loadEventFired"
        self._passed |= method == "Emulation.virtualTimeBudgetExpired"
        if method in CONSOLE:
            self.console.append(message["params"])
        return message


def _pipe() -> tuple[int, int]:
    """Return a pipe whose descriptors differ from those that the browser inherits."""
    low = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in low)
    for end in low:
        os.close(end)
    return high[0], high[1]
