"""What the parts of `dix check-cache --programme` share: prompts asked without and with the cache, compared and counted.

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

from deepinfer_cli.answer_tokens import first_difference, tokens_of
from deepinfer_cli.api import Answer, Api, Collector, RequestRefused
from deepinfer_cli.cache_rule import PAGE, cap
from deepinfer_cli.live import checksum_errors, settled_metrics
from deepinfer_cli.text import sentences, sized
from server.errors import ServerUnreachable

_RESTART_PATIENCE_S = 300.0
Messages = list[dict[str, str]]


@dataclass(slots=True)
class Part:
    """One part of the programme in sums. possible_tokens: what an ideal cache would have hit. accepted_tokens: drafts that were kept
    in answers with the cache. wrong: what differed or went unnoticed.
    """

    name: str
    prompts: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    possible_tokens: int = 0
    output_tokens: int = 0
    accepted_tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    note: str = ""

    @property
    def share(self) -> float | None:
        return self.hit_tokens / self.possible_tokens if self.possible_tokens else None


class Trial:
    """Sends everything over one session, so that affinity keeps it on one rank.

    reference: the server that answers without the cache; the same one unless the two are to differ in something else as well.
    loops: rounds of reset, cold, warm on one prompt.
    """

    def __init__(
        self,
        api: Api,
        reference: Api,
        model: str,
        max_tokens: int,
        seed: int,
        loops: int,
    ) -> None:
        self.api, self.reference, self.loops = api, reference, loops
        self.random = random.Random(seed)
        self.base: dict[str, Any] = {
            "model": model,
            "temperature": 0,
            "max_tokens": max_tokens,
            "thinking": {"type": "disabled"},
            "session_id": f"check-cache-programme-{seed}",
            "logprobs": True,
        }
        self.part = Part("")
        self._stored: list[list[int]] = []
        self._reported = 0  # cached tokens in the usage of all answers of a part
        self._context = _context(api)

    def run(self, name: str, play: Callable[[Trial], None], *, counts: bool = True) -> Part:
        """Play one part on an empty cache. counts: every answer brings its usage, so that the server's counter has to agree."""
        self.part = Part(name)
        self.forget()
        before, self._reported = self._hit_tokens(), 0
        play(self)
        if before is not None and counts:
            counted = (self._hit_tokens() or 0) - before
            if counted != self._reported:
                self.part.wrong.append(f"the server counted {counted} cached tokens, its answers reported {self._reported}")
        return self.part

    # -- prompts -----------------------------------------------------------------------------------------------------------

    def user(self, count: int) -> dict[str, str]:
        """A message of `count` sentences, about 12 tokens each, that begins like no other."""
        return {"role": "user", "content": f"{self.random.getrandbits(40)} {sentences(self.random, count)}"}

    def words(self, tokens: int) -> str:
        words = sentences(self.random, tokens // 8 + 1).split()
        return " ".join(words[: max(1, tokens)])

    def of_length(self, target: int) -> Messages | None:
        """A prompt of exactly `target` tokens; None when the template alone or the context forbids it."""
        if target + int(self.base["max_tokens"]) > self._context:
            return None
        for _ in range(3):
            seed = str(self.random.getrandbits(40))
            content = sized(seed, target, lambda text: len(self._ids([{"role": "user", "content": text}])))
            messages = [{"role": "user", "content": content}]
            if len(self._ids(messages)) == target:
                return messages
        return None

    def _ids(self, messages: Messages) -> list[int]:
        body = {"model": self.base["model"], "messages": messages, "thinking": self.base["thinking"]}
        return [int(token) for token in self.api.post("/tokenize", body)["tokens"]]

    # -- requests ----------------------------------------------------------------------------------------------------------

    def compare(self, messages: Messages, *, credit: bool = True) -> str:
        """Both answers of a prompt; returns the text. credit: count what is possible, which is unknown after aborts and evictions."""
        ids = self._ids(messages)
        if len(ids) + int(self.base["max_tokens"]) > self._context:
            self.part.note = f"prompts beyond {self._context:,} tokens left out"
            return ""
        possible = self._possible(ids)
        cold, warm = self.ask(messages, cached=False), self.ask(messages, cached=True)
        self.note_answer(warm, cold)
        if credit:
            self.credit(warm.cached, possible)
        if warm.cached > cap(len(ids)):
            self.part.wrong.append(f"{warm.cached} cached tokens of {len(ids)}: more than a prompt of that length may take")
        self._stored.append(ids)
        return cold.content

    def credit(self, hit_tokens: int, possible_tokens: int) -> None:
        self.part.hit_tokens += hit_tokens
        self.part.possible_tokens += possible_tokens

    def note_answer(self, warm: Answer, cold: Answer) -> None:
        """Count an answer with the cache, and compare it with the one without."""
        part = self.part
        part.prompts += 1
        part.prompt_tokens += warm.prompt_tokens
        part.output_tokens += warm.output_tokens
        part.accepted_tokens += int((warm.usage.get("completion_tokens_details") or {}).get("accepted_prediction_tokens") or 0)
        left, right = tokens_of(self.reference, cold), tokens_of(self.api, warm)
        at = first_difference(left, right)
        if at is None and cold.finish_reason != warm.finish_reason:
            at = len(left)
        if at is not None:
            part.wrong.append(f"prompt {part.prompts} ({warm.prompt_tokens} tokens, {warm.cached} cached): token {at} differs")

    def ask(self, messages: Messages, *, cached: bool, **fields: Any) -> Answer:
        """fields: of the request, beside those that all have."""
        api = self.api if cached else self.reference
        answer = api.chat({**self.base, "messages": messages, "prefix_cache": cached, **fields})
        self._reported += answer.cached
        return answer

    def ask_and_forget(self, messages: Messages) -> Answer:
        """An answer with the cache, which is emptied as soon as the first token is there."""
        chunks = self.api.stream({**self.base, "messages": messages})
        begin = next(chunks)
        self.forget()
        collector = Collector()
        for chunk in (begin, *chunks):
            collector.push(chunk)
        answer = collector.answer()
        self._reported += answer.cached
        return answer

    def leave(self, messages: Messages) -> None:
        """A stream that the client leaves at its first chunk; returns when the server has noticed."""
        chunks = self.api.stream({**self.base, "messages": messages})
        next(chunks)
        chunks.close()  # type: ignore[attr-defined]
        settled_metrics(self.api)

    def forget(self) -> None:
        """Empty the cache."""
        self._stored.clear()
        with contextlib.suppress(RequestRefused):  # a server without that route keeps what it has; then hits exceed what is possible
            self.api.post("/reset_prefix_cache", {})

    def _possible(self, ids: Sequence[int]) -> int:
        shared = max((_common(stored, ids) for stored in self._stored), default=0)
        return min(shared // PAGE * PAGE, cap(len(ids)))

    # -- the server --------------------------------------------------------------------------------------------------------

    def inject(self, kind: str, **arguments: Any) -> bool:
        """Break something on purpose. False, with a note, where the server refuses."""
        try:
            self.api.post("/deepinfer/debug/fault", {"kind": kind, **arguments})
        except RequestRefused as error:
            self.part.note = f"not injected: {error}" if error.status != 404 else "this server injects no faults (--debug-faults)"
            return False
        return True

    def find_rank(self) -> int:
        """The rank that serves this session: the one whose lookups grow."""
        before = self._per_rank("lookups_total")
        self.ask([self.user(30)], cached=True)
        after = self._per_rank("lookups_total")
        return max(after, key=lambda rank: after[rank] - before.get(rank, 0), default=0)

    def errors(self) -> int:
        """Checksum errors that the server has counted."""
        return checksum_errors(settled_metrics(self.api))

    def evictions(self) -> int:
        return sum(self._per_rank("evictions_total").values())

    def recovered_pages(self) -> int:
        """Pages that the ranks took over from killed predecessors."""
        return sum(int((cache.get("recovered") or {}).get("pages", 0)) for cache in self._caches().values())

    def incarnations(self) -> dict[int, int]:
        """How often each rank was started; the metrics call it `generation`."""
        return {int(rank["rank"]): int(rank.get("generation", 0)) for rank in settled_metrics(self.api).get("ranks") or []}

    def await_restart(self, before: Mapping[int, int]) -> bool:
        """Wait until all ranks of a later incarnation than `before` are ready; False when they do not come."""
        give_up_s = time.monotonic() + _RESTART_PATIENCE_S
        while time.monotonic() < give_up_s:
            time.sleep(0.2)
            with contextlib.suppress(ServerUnreachable):
                ranks = self.api.get("/deepinfer/metrics").get("ranks") or []
                if all(rank.get("generation", 0) > before.get(rank["rank"], 0) for rank in ranks):
                    self.api.get("/health/ready")
                    return True
        return False

    def _caches(self) -> dict[int, Mapping[str, Any]]:
        """The counters of every rank now; empty where the server tells none."""
        ranks = settled_metrics(self.api).get("ranks") or []
        return {int(rank.get("rank", 0)): rank.get("prefix_cache") or {} for rank in ranks}

    def _per_rank(self, counter: str) -> dict[int, int]:
        return {rank: int(cache.get(counter, 0)) for rank, cache in self._caches().items()}

    def _hit_tokens(self) -> int | None:
        """The server's counter of cached tokens, replaced ranks included; None where it tells none."""
        totals = settled_metrics(self.api).get("totals")
        return int((totals.get("prefix_cache") or {}).get("hit_tokens_total", 0)) if totals else None


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    at = first_difference(a, b)
    return len(a) if at is None else at


def _context(api: Api) -> int:
    listed = api.get("/v1/models").get("data") or [{}]
    return int(listed[0].get("max_model_len") or 2**31)
