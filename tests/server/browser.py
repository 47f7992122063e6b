"""A headless Chromium driven over its DevTools socket: just enough to use a page and look at it."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

START_S = 40.0


def chromium() -> str | None:
    """The browser of this machine, if it has one."""
    return next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)


class Page:
    """One tab. `problems` collects what the page wrote to its console as an error, and exceptions; `dialogs` what it asked people."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.problems: list[str] = []
        self.dialogs: list[str] = []
        self.requested: list[str] = []
        self._socket = socket
        self._number = 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            data = json.loads(message.data)
            if "id" in data:
                self._answers.pop(data["id"]).set_result(data)
            elif data["method"] == "Runtime.exceptionThrown":
                self.problems.append(str(data["params"]["exceptionDetails"]))
            elif data["method"] == "Log.entryAdded" and data["params"]["entry"]["level"] == "error":
                self.problems.append(data["params"]["entry"]["text"])
            elif data["method"] == "Page.javascriptDialogOpening":
                self.dialogs.append(data["params"]["message"])
                await self._post("Page.handleJavaScriptDialog", accept=False)
            elif data["method"] == "Network.requestWillBeSent":
                self.requested.append(data["params"]["request"]["url"])

    async def _post(self, method: str, **params: Any) -> asyncio.Future[dict[str, Any]]:
        self._number += 1
        number, waiting = self._number, asyncio.get_running_loop().create_future()
        self._answers[number] = waiting
        await self._socket.send_json({"id": number, "method": method, "params": params})
        return waiting

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        answer = await asyncio.wait_for(await self._post(method, **params), 30)
        assert "error" not in answer, answer
        return dict(answer["result"])

    async def open(self, url: str) -> None:
        for domain in ("Runtime", "Log", "Network", "Page"):
            await self.send(f"{domain}.enable")
        await self.send("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def evaluate(self, expression: str) -> Any:
        answer = await self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, expression: str, timeout_s: float = 30.0) -> Any:
        deadline = time.monotonic() + timeout_s
        while not (value := await self.evaluate(expression)):
            assert time.monotonic() < deadline, f"{expression} is still {value!r}"
            await asyncio.sleep(0.05)
        return value

    async def type(self, text: str) -> None:
        """Keys into the focused element, then Enter."""
        await self.send("Input.insertText", text=text)
        enter = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13}
        await self.send("Input.dispatchKeyEvent", type="keyDown", text="\r", **enter)
        await self.send("Input.dispatchKeyEvent", type="keyUp", **enter)

    async def click(self, selector: str) -> None:
        await self.evaluate(f"document.querySelector({selector!r}).click()")

    async def scheme(self, dark: bool) -> None:
        await self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    async def size(self, width: int, height: int) -> None:
        await self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    async def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode((await self.send("Page.captureScreenshot"))["data"]))


@asynccontextmanager
async def browser(width: int = 1280, height: int = 800) -> AsyncIterator[Page]:
    """A fresh browser with a profile of its own; raises FileNotFoundError on a machine without one."""
    binary = chromium()
    if binary is None:
        raise FileNotFoundError("no Chromium on this machine: install the package chromium")
    with tempfile.TemporaryDirectory(prefix="dxc-", ignore_cleanup_errors=True) as profile:
        command = [
            binary,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--no-first-run",
        ]
        command += [f"--user-data-dir={profile}", "--remote-debugging-port=0", f"--window-size={width},{height}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            port = await _port(Path(profile) / "DevToolsActivePort")
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
                    target = next(tab for tab in await response.json() if tab["type"] == "page")
                async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=64 * 2**20) as socket:
                    page = Page(socket)
                    await page.size(width, height)
                    yield page
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def _port(path: Path) -> int:
    deadline = time.monotonic() + START_S
    while not (path.exists() and path.read_text().strip()):
        assert time.monotonic() < deadline, "the browser did not start"
        await asyncio.sleep(0.05)
    return int(path.read_text().splitlines()[0])
