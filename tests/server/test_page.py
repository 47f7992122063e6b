"""The page for people in a real browser: chat with streaming, figures per turn, ranks, both colour schemes, no other host."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.browser import Page, browser
from tests.server.harness import FakeServer, eventually, finish, start_fake

pytestmark = pytest.mark.slow
IDLE = "document.getElementById('send').textContent === 'Send'"
ANSWER = "[...document.querySelectorAll('.answer .content')].at(-1).textContent"
FIGURES = "[...document.querySelectorAll('.answer .figures')].at(-1).textContent"


@pytest.fixture(scope="module")
def served() -> Iterator[FakeServer]:
    server = start_fake(dp=2)
    yield server
    finish(server)


@pytest.fixture
async def page(served: FakeServer) -> AsyncIterator[Page]:
    served.script("First a thought.</think>Rivers bend <b>and</b> flood.", delay_s=0.03)
    async with browser() as tab:
        await tab.open(served.url)
        await tab.until("document.querySelectorAll('.rank').length === 2")
        yield tab
        assert tab.problems == []
        assert {httpx.URL(url).host for url in tab.requested if url.startswith("http")} == {"127.0.0.1"}


async def say(page: Page, text: str) -> None:
    await page.evaluate("document.getElementById('text').focus()")
    await page.type(text)


def keep(name: str) -> Path:
    """Where pictures go: a directory named by the environment, for looking at them, else nowhere lasting."""
    return Path(os.environ.get("SCREENSHOT_DIR", tempfile.gettempdir())) / f"dix-page-{name}.png"


async def test_answer_streams_with_live_figures_and_thinking_apart(page: Page) -> None:
    await page.click("#thinking")
    await say(page, "tell me")
    partial = await page.until(f"{ANSWER}.length > 3 && {ANSWER}")
    assert "Rivers bend <b>and</b> flood.".startswith(partial)
    assert await page.evaluate("document.getElementById('send').textContent") == "Stop"
    for dark in (False, True):
        await page.scheme(dark)
        path = keep(f"streaming-{'dark' if dark else 'light'}")
        await page.screenshot(path)
        assert path.stat().st_size > 10_000
    await page.until(IDLE)
    assert await page.evaluate(ANSWER) == "Rivers bend <b>and</b> flood."
    assert await page.evaluate("document.querySelector('.reasoning span').textContent") == "First a thought."
    assert await page.evaluate("document.querySelectorAll('.content b').length") == 0
    figures = await page.evaluate(FIGURES)
    for word in ("TTFT ", " ms", "tok/s ", "generated ", "cached 0 of "):
        assert word in figures, figures


async def test_second_conversation_shows_cached_tokens_and_the_ranks_hit_rate(page: Page, served: FakeServer) -> None:
    served.record_path.unlink(missing_ok=True)
    for _ in range(2):
        await page.click("#clear")
        await say(page, "the very same words")
        await page.until(IDLE)
    prompt = len(served.recorded()[-1]["ids"])
    assert f"cached {prompt - 1} of {prompt}" in await page.evaluate(FIGURES)
    await page.until("[...document.querySelectorAll('.hits em')].some(node => /[1-9]/.test(node.textContent))")
    assert await page.evaluate("document.querySelectorAll('.queue').length") == 2


async def test_history_is_sent_back_as_it_was_generated(page: Page, served: FakeServer) -> None:
    served.record_path.unlink(missing_ok=True)
    for text in ("one", "two"):
        await say(page, text)
        await page.until(IDLE)
    first, second = (served.tokenizer.decode(line["ids"]) for line in served.recorded())
    assert "Rivers bend <b>and</b> flood." in second
    assert "one" in first
    assert "two" in second


async def test_stop_ends_the_request_on_the_server(page: Page, served: FakeServer) -> None:
    served.script("again and again " * 200, delay_s=0.05)
    await say(page, "go on")
    await page.until(f"{ANSWER}.length > 10")
    await page.click("#send")
    await page.until(f"{FIGURES}.includes('stopped')")
    eventually(lambda: served.metrics()["requests"]["active"] == 0)


async def test_refusal_and_lost_server_are_told_in_words(page: Page, served: FakeServer) -> None:
    await page.evaluate("document.getElementById('temperature').value = '5'")
    await say(page, "too hot")
    await page.until(f"{FIGURES}.includes('temperature')")
    page.problems.clear()  # the browser notes the status 400
    await page.evaluate("document.getElementById('temperature').value = '1'")
    await page.evaluate("window.fetch = () => Promise.reject(new Error('gone'))")
    await page.until("document.getElementById('state').textContent === 'unreachable'")


async def test_narrow_window_needs_no_sideways_scrolling(page: Page) -> None:
    await page.size(390, 800)
    await say(page, "long" * 60)
    await page.until(IDLE)
    await page.screenshot(keep("narrow"))
    assert await page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
