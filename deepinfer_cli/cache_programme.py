"""The programme of `dix check-cache --programme`: generated conversations and injected faults, every prompt without and with the cache.

Greedy. What a prompt could take from the cache is worked out here, from the ids of all prompts sent before: the longest shared prefix
in whole pages, short of the tokens that are always computed. A cache with unlimited memory and a state at every page would hit that.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepinfer_cli.api import Answer, Api, Collector, RequestRefused
from deepinfer_cli.live import STATS_WAIT_S
from deepinfer_cli.text import sentences, sized

PAGE, KEEP = 128, 140  # as in `commands/check_cache.py`
GROWTH = (1, 2, 11, 24, 64, 127, 128, 139, 140, 141, 300, 1000, 3000)  # tokens by which a conversation grows, about
LENGTH_PAGES = (1, 2, 3, 20)  # page counts around which every length of a prompt that matters is tried
LONG_PAGES, LONG_LOOPS = 100, 100  # also tried from that many loops on: on a CPU it takes minutes
LENGTH_OFFSETS = (-1, 0, 1, 139, 140, 141)  # a whole page, one more token, and the tokens that are always computed
_PATIENCE = 6  # looks at a counter that is behind
DELAY_S = 0.3
FAULTS = ("flip", "drop", "short", "delay")
Messages = list[dict[str, str]]


@dataclass(slots=True)
class Part:
    """One part of the programme in sums. possible_tokens: what an ideal cache would have hit. wrong: what differed or went unnoticed."""

    name: str
    prompts: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    possible_tokens: int = 0
    output_tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    note: str = ""

    @property
    def share(self) -> float | None:
        return self.hit_tokens / self.possible_tokens if self.possible_tokens else None


class Programme:
    """Sends everything over one session, so that affinity keeps it on one rank.

    tokens_of: the answer's tokens. checksum_errors: the server's counter now. loops: rounds of reset, cold, warm on one prompt.
    """

    def __init__(
        self,
        api: Api,
        model: str,
        max_tokens: int,
        seed: int,
        tokens_of: Callable[[Api, Answer], list[str]],
        checksum_errors: Callable[[Api], int],
        on_part: Callable[[str], None],
        loops: int,
    ) -> None:
        self._api, self._random, self._seed = api, random.Random(seed), seed
        self._tokens_of, self._checksum_errors, self._on_part = tokens_of, checksum_errors, on_part
        self._base: dict[str, Any] = {
            "model": model,
            "temperature": 0,
            "max_tokens": max_tokens,
            "thinking": {"type": "disabled"},
            "session_id": f"check-cache-programme-{seed}",
            "logprobs": True,
        }
        self._loops = loops
        self._stored: list[list[int]] = []
        self._reported = 0  # cached tokens in the usage of all answers of a part
        self._context = _context(api)
        self._part = Part("")

    def run(self) -> list[Part]:
        """All parts, in order. A part that the server does not offer says so in its note."""
        parts = [
            self._run(name, part)
            for name, part in (
                ("growth", self._growth),
                ("lengths", self._lengths),
                ("determinism", self._determinism),
                ("resend", self._resend),
                ("edits", self._edits),
                ("forks", self._forks),
                ("reset", self._reset_during_answer),
                ("aborts", self._aborts),
                ("pressure", self._pressure),
            )
        ]
        return parts + [self._run(f"fault {kind}", lambda kind=kind: self._fault(kind)) for kind in FAULTS]  # type: ignore[misc]

    def _run(self, name: str, part: Callable[[], None]) -> Part:
        self._on_part(name)
        self._part = Part(name)
        self._forget()
        before, self._reported = _hit_tokens(self._api), 0
        part()
        if before is not None and name != "aborts":  # an answer that was left brings no usage
            counted = self._counted_since(before)
            if counted != self._reported:
                self._part.wrong.append(f"the server counted {counted} cached tokens, its answers reported {self._reported}")
        return self._part

    def _counted_since(self, before: int) -> int:
        """What the server's counter grew by, as soon as it says the same as the answers: a busy rank reports late."""
        counted = 0
        for _ in range(_PATIENCE):
            counted = (_hit_tokens(self._api) or 0) - before
            if counted >= self._reported:
                break
        return counted

    def _forget(self) -> None:
        self._stored.clear()
        with contextlib.suppress(RequestRefused):  # a server without that route keeps what it has; then hits exceed what is possible
            self._api.post("/reset_prefix_cache", {})

    # -- parts -------------------------------------------------------------------------------------------------------------

    def _growth(self) -> None:
        """A conversation that grows by 1 to 3,000 tokens: within the last message when that is too little for a turn."""
        messages = [self._user(60)]
        self._compare(messages)
        for tokens in GROWTH:
            if tokens < 100:
                messages[-1] = {"role": "user", "content": messages[-1]["content"] + " " + self._words(tokens)}
            else:
                messages += [{"role": "assistant", "content": self._compare(messages)}, {"role": "user", "content": self._words(tokens)}]
            self._compare(messages)

    def _lengths(self) -> None:
        """Prompts of every length around a page's end and around the tokens that are always computed: first, and again."""
        missed = 0
        for pages in (*LENGTH_PAGES, *([LONG_PAGES] if self._loops >= LONG_LOOPS else [])):
            for offset in LENGTH_OFFSETS:
                messages = self._of_length(PAGE * pages + offset)
                if messages is None:
                    missed += 1
                    continue
                cold = self._ask(messages, cached=False)
                for possible in (0, cap(PAGE * pages + offset)):
                    warm = self._ask(messages, cached=True)
                    self._note_answer(warm, cold)
                    self._part.hit_tokens += warm.cached
                    self._part.possible_tokens += possible
                    if warm.cached > possible:
                        self._part.wrong.append(f"{warm.cached} cached tokens of {PAGE * pages + offset}, {possible} are possible")
        self._part.note = f"{missed} lengths are out of this model's reach" if missed else ""

    def _of_length(self, target: int) -> Messages | None:
        """A prompt of exactly `target` tokens; None when the template alone or the context forbids it."""
        if target + int(self._base["max_tokens"]) > self._context:
            return None
        for _ in range(3):
            seed = str(self._random.getrandbits(40))
            content = sized(seed, target, lambda text: len(self._ids([{"role": "user", "content": text}])))
            messages = [{"role": "user", "content": content}]
            if len(self._ids(messages)) == target:
                return messages
        return None

    def _determinism(self) -> None:
        """One prompt, forgotten and asked twice, over and over: all answers are the same."""
        messages = [self._user(40)]
        first = self._ask(messages, cached=False)
        for _ in range(self._loops):
            self._forget()
            for possible in (0, cap(first.prompt_tokens)):
                warm = self._ask(messages, cached=True)
                self._note_answer(warm, first)
                self._part.hit_tokens += warm.cached
                self._part.possible_tokens += possible

    def _reset_during_answer(self) -> None:
        """A cache that is emptied while an answer is being written: the answer stays, and nothing of it is found afterwards."""
        messages = [self._user(60)]
        whole = self._ask(messages, cached=False)
        chunks = self._api.stream({**self._base, "messages": messages})
        begin = next(chunks)
        self._forget()
        collector = Collector()
        for chunk in (begin, *chunks):
            collector.push(chunk)
        answer = collector.answer()
        self._reported += answer.cached
        self._note_answer(answer, whole)
        again = self._ask(messages, cached=True)
        self._note_answer(again, whole)
        if again.cached:
            self._part.wrong.append(f"{again.cached} tokens were found that had been forgotten")

    def _resend(self) -> None:
        for length in (20, 30, 41, 80):
            messages = [self._user(length)]
            for _ in range(3):
                self._compare(messages)

    def _edits(self) -> None:
        """Words replaced in the middle: at a quarter, a half and the end of what was sent."""
        messages = [self._user(40), {"role": "assistant", "content": self._words(150)}, self._user(40)]
        self._compare(messages)
        for at, share in ((0, 0.3), (0, 0.9), (2, 0.5), (2, 0.99)):
            words = messages[at]["content"].split()
            words[int(share * (len(words) - 1))] = "edited"
            messages[at] = {"role": "user", "content": " ".join(words)}
            self._compare(messages)

    def _forks(self) -> None:
        """Branches that share a system text, and branches of branches; each is visited twice."""
        root: Messages = [{"role": "system", "content": self._words(700)}]
        for _ in range(3):
            branch = [*root, self._user(20)]
            self._compare(branch)
            for _ in range(2):
                self._compare([*branch, {"role": "assistant", "content": "Yes."}, self._user(15)])

    def _aborts(self) -> None:
        """Streams that the client leaves before their first token, then the same prompt to its end."""
        for length in (40, 90):
            messages = [self._user(length)]
            self._leave(messages)
            time.sleep(STATS_WAIT_S)
            self._compare(messages, credit=False)
            self._compare(messages)

    def _pressure(self) -> None:
        """Prompts that share nothing until the arena evicts, and the first of them again in between."""
        kept = [self._user(60)]
        self._compare(kept)
        before = _evictions(self._api)
        for number in range(60):
            self._ask([self._user(250)], cached=True)
            if number % 6 == 5:
                self._compare(kept, credit=False)
                if _evictions(self._api) > before:
                    break
        evicted = _evictions(self._api) - before
        self._part.note = f"{evicted:,} pages evicted" if evicted else "the arena is too large to fill here"

    def _fault(self, kind: str) -> None:
        """Harm one stored prompt and look at whether the server notices and still answers with the same tokens."""
        messages = [self._user(38)]
        rank = self._find_rank()
        cold = self._ask(messages, cached=False)
        if kind in ("flip", "delay"):
            self._ask(messages, cached=True)
        arguments = {"seconds": DELAY_S} if kind == "delay" else {}
        try:
            self._api.post("/deepinfer/debug/fault", {"kind": kind, "rank": rank, **arguments})
        except RequestRefused as error:
            self._part.note = f"not injected: {error}" if error.status != 404 else "this server injects no faults (--debug-faults)"
            return
        if kind in ("drop", "short"):
            self._ask(messages, cached=True)
        errors = self._settled_errors()
        warm = self._ask(messages, cached=True)
        self._note_answer(warm, cold)
        noticed = self._settled_errors() - errors
        if kind == "delay":
            if warm.cached == 0 or warm.ttft_s < DELAY_S:
                self._part.wrong.append(f"the delay did not show: {warm.cached} cached tokens after {warm.ttft_s:.2f} s")
        elif noticed == 0 or warm.cached:
            self._part.wrong.append(f"went unnoticed: {noticed} checksum errors, {warm.cached} cached tokens")
        self._note_answer(self._ask(messages, cached=True), cold)
        self._part.note = f"checksum errors: {noticed}" if kind != "delay" else f"first token after {warm.ttft_s:.2f} s"

    # -- requests ----------------------------------------------------------------------------------------------------------

    def _compare(self, messages: Messages, *, credit: bool = True) -> str:
        """Both answers of a prompt; returns the text. credit: count what is possible, which is unknown after aborts and evictions."""
        ids = self._ids(messages)
        if len(ids) + int(self._base["max_tokens"]) > self._context:
            self._part.note = f"prompts beyond {self._context:,} tokens left out"
            return ""
        possible = self._possible(ids)
        cold, warm = self._ask(messages, cached=False), self._ask(messages, cached=True)
        part = self._part
        self._note_answer(warm, cold)
        if credit:
            part.hit_tokens += warm.cached
            part.possible_tokens += possible
        if warm.cached > cap(len(ids)):
            part.wrong.append(f"{warm.cached} cached tokens of {len(ids)}: more than a prompt of that length may take")
        self._stored.append(ids)
        return cold.content

    def _note_answer(self, warm: Answer, cold: Answer) -> None:
        part = self._part
        part.prompts += 1
        part.prompt_tokens += warm.prompt_tokens
        part.output_tokens += warm.output_tokens
        left, right = self._tokens_of(self._api, cold), self._tokens_of(self._api, warm)
        if left != right or cold.finish_reason != warm.finish_reason:
            at = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
            part.wrong.append(f"prompt {part.prompts} ({warm.prompt_tokens} tokens, {warm.cached} cached): token {at} differs")

    def _ask(self, messages: Messages, *, cached: bool) -> Answer:
        answer = self._api.chat({**self._base, "messages": messages, "prefix_cache": cached})
        self._reported += answer.cached
        return answer

    def _leave(self, messages: Messages) -> None:
        chunks = self._api.stream({**self._base, "messages": messages})
        next(chunks)
        chunks.close()  # type: ignore[attr-defined]

    def _ids(self, messages: Messages) -> list[int]:
        body = {"model": self._base["model"], "messages": messages, "thinking": self._base["thinking"]}
        return [int(token) for token in self._api.post("/tokenize", body)["tokens"]]

    def _possible(self, ids: Sequence[int]) -> int:
        shared = max((_common(stored, ids) for stored in self._stored), default=0)
        return min(shared // PAGE * PAGE, cap(len(ids)))

    # -- the server --------------------------------------------------------------------------------------------------------

    def _find_rank(self) -> int:
        """The rank that serves this session: the one whose lookups grow."""
        before = _lookups(self._api)
        self._ask([self._user(30)], cached=True)
        after = _lookups(self._api)
        return max(after, key=lambda rank: after[rank] - before.get(rank, 0), default=0)

    def _settled_errors(self) -> int:
        time.sleep(STATS_WAIT_S)
        return self._checksum_errors(self._api)

    # -- text --------------------------------------------------------------------------------------------------------------

    def _user(self, count: int) -> dict[str, str]:
        """A message of about 12 tokens per sentence that begins like no other."""
        return {"role": "user", "content": f"{self._random.getrandbits(40)} {sentences(self._random, count)}"}

    def _words(self, tokens: int) -> str:
        words = sentences(self._random, tokens // 8 + 1).split()
        return " ".join(words[: max(1, tokens)])


def cap(prompt_tokens: int) -> int:
    """The most that any prompt of this length can take from the cache."""
    return max(0, (prompt_tokens - KEEP) // PAGE * PAGE)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _context(api: Api) -> int:
    listed = api.get("/v1/models").get("data") or [{}]
    return int(listed[0].get("max_model_len") or 2**31)


def _caches(api: Api) -> dict[int, Mapping[str, Any]]:
    """The counters of every rank, after the wait in which it reports what it has counted; empty where the server tells none."""
    time.sleep(STATS_WAIT_S)
    try:
        ranks = api.get("/deepinfer/metrics").get("ranks") or []
    except RequestRefused:
        return {}
    return {int(rank.get("rank", 0)): rank.get("prefix_cache") or {} for rank in ranks}


def _lookups(api: Api) -> dict[int, int]:
    return {rank: int(cache.get("lookups_total", 0)) for rank, cache in _caches(api).items()}


def _hit_tokens(api: Api) -> int | None:
    """All ranks' counter of cached tokens; None where the server tells none."""
    caches = _caches(api).values()
    return sum(int(cache.get("hit_tokens_total", 0)) for cache in caches) if caches else None


def _evictions(api: Api) -> int:
    return sum(int(cache.get("evictions_total", 0)) for cache in _caches(api).values())
