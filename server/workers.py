"""Threads for work that would block the event loop: JSON, rendering, tokenisation, hashing of long prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
MAX_THREADS = 4


class Workers:
    def __init__(self, threads: int = MAX_THREADS) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="text")

    async def run(self, function: Callable[..., T], *arguments: object, inline: bool = False) -> T:
        """`inline`: the work is small enough for the event loop's own thread, and a hop to another one would cost more."""
        if inline:
            return function(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    def then(self, function: Callable[..., T], *arguments: object, callback: Callable[[T], None]) -> None:
        """Run `function` in a thread and hand its result to `callback` on the event loop; nobody waits for it."""
        future = asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)
        future.add_done_callback(lambda done: None if done.cancelled() else callback(done.result()))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
