"""`dix check-cache`: every turn of a conversation once without and once with the prefix cache, on a live server.

Greedy, chat mode, a conversation made from a fixed seed, one session id so that affinity keeps it on one rank.
The answer without the cache joins the history of both, so one difference cannot hide the next.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer_cli.answer_tokens import first_difference, tokens_of
from deepinfer_cli.api import Answer, Api
from deepinfer_cli.cache_rule import LEAST, Predictor
from deepinfer_cli.cache_shortfall import ArenaCounts, why_not_as_predicted
from deepinfer_cli.exit_codes import ExitCode
from deepinfer_cli.invocation import Invocation
from deepinfer_cli.live import bounded_replays, checksum_errors, settled_metrics
from deepinfer_cli.options import Port, Url, command
from deepinfer_cli.servers import connect
from deepinfer_cli.text import sized
from deepinfer_cli.ui import Column
from deepinfer_cli.units import show_number
from hicache.errors import ConfigError

if TYPE_CHECKING:
    from deepinfer_cli.cache_trial import Part, Trial


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn's comparison. `different_at`: index of the first differing token, None when all are the same. Times in seconds."""

    turn: int
    prompt_tokens: int
    cached_tokens: int
    predicted_tokens: int
    ttft_without_s: float
    ttft_with_s: float
    output_tokens: int
    different_at: int | None
    difference: str = ""
    predicted_without_tails: int = 0
    reason: str = ""  # why the cached tokens are not those predicted

    @property
    def same(self) -> bool:
        return self.different_at is None


def _check_cache(
    call: Invocation,
    port: Port = None,
    url: Url = None,
    turns: Annotated[int, typer.Option("--turns", metavar="N", min=1, help="Turns of the conversation.")] = 3,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", metavar="N", help=f"Tokens of the first prompt; {LEAST} is the least.")
    ] = 1024,
    growth: Annotated[int, typer.Option("--growth", metavar="N", min=1, help="Tokens that each later turn adds.")] = 300,
    max_tokens: Annotated[int, typer.Option("--max-tokens", metavar="N", min=1, help="Longest answer of a turn.")] = 32,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Seed of the conversation's text.")] = 0,
    programme: Annotated[
        bool,
        typer.Option(
            "--programme",
            help="Growth, lengths, edits, forks, tenants, resets, aborts, eviction, restart and faults: minutes. Empties the cache.",
        ),
    ] = False,
    loops: Annotated[
        int,
        typer.Option("--loops", metavar="N", min=1, help="Rounds of reset, cold, warm on one prompt; from 100 on also 100-page prompts."),
    ] = 20,
    reference_url: Annotated[
        str | None,
        typer.Option("--reference-url", metavar="URL", help="Server that answers without the cache instead, e.g. one without drafts."),
    ] = None,
) -> int:
    """Prove on a live server that the prefix cache changes no token, and show how much time it saves.

      dix check-cache
      dix check-cache --port 8901 --turns 3
      dix check-cache --programme
      dix check-cache --programme --port 8901 --reference-url 127.0.0.1:8902

    Exit code 0: same tokens, and later turns hit. 1: a token differs, or a stored page was damaged. 5: no later turn hit, nothing proved.
    Next: dix cache stats
    """
    if prompt_tokens < LEAST:
        raise ConfigError(f"--prompt-tokens is {prompt_tokens}", hint=f"{LEAST} is the shortest prompt that can hit")
    api = connect(call, port, url)
    model, before = api.model(), settled_metrics(api)
    if programme:
        from deepinfer_cli.cache_trial import Trial

        reference = connect(call, None, reference_url) if reference_url else api
        code = run_programme(call, Trial(api, reference, model, max_tokens, seed, loops), model)
        return tell_of_replays(call, code, before, settled_metrics(api))
    if reference_url:
        raise ConfigError("--reference-url needs --programme", hint="dix check-cache --programme --reference-url URL")
    results = Conversation(call, api, model, prompt_tokens, growth, max_tokens, seed).run(turns)
    after = settled_metrics(api)
    results = [with_reason(turn, ArenaCounts.of(before), ArenaCounts.of(after)) for turn in results]
    damaged = checksum_errors(after) - checksum_errors(before)
    code = judge(results, damaged)
    show(call, model, api.url, results, damaged, code)
    return tell_of_replays(call, code, before, after)


def tell_of_replays(call: Invocation, code: int, before: Mapping[str, Any], after: Mapping[str, Any]) -> int:
    """Say so when tokens may differ because prompts resumed behind approximate windows. before, after: metrics. Returns `code`."""
    replays = bounded_replays(after) - bounded_replays(before)
    if replays > 0 and code == ExitCode.NO:
        call.ui.note(f" hint: {replays} prompts resumed by bounded replay, which approximates: hicache.replay=exact or off", "accent")
    return code


def run_programme(call: Invocation, trial: Trial, model: str) -> int:
    from deepinfer_cli import cache_programme

    parts = cache_programme.run_programme(trial, lambda name: call.ui.note(name, "quiet"))
    wrong = [text for part in parts for text in part.wrong]
    hits = sum(part.hit_tokens for part in parts)
    code = ExitCode.NO if wrong else ExitCode.OK if hits else ExitCode.INVALID
    if call.json:
        records = [{**dataclasses.asdict(part), "share": part.share} for part in parts]
        head = {"model": model, "url": trial.api.url, "reference_url": trial.reference.url}
        call.ui.document("dix.check-cache.programme/1", {**head, "parts": records, "exit_code": int(code)})
        return code
    heads = ("PROMPTS", "PROMPT tok", "HIT tok", "POSSIBLE tok", "SHARE")
    columns = [Column("PART", right=False), *(Column(head) for head in heads), Column("TOKENS", right=False), Column("NOTE", right=False)]
    call.ui.table(columns, [_part_cells(part) for part in parts])
    accepted = sum(part.accepted_tokens for part in parts)
    verdict = "the cache changed no token, and every injected fault was noticed" if not wrong else f"{len(wrong)} findings"
    call.ui.print(
        verdict if hits or wrong else "nothing proved: nothing came from the cache", "good" if code is ExitCode.OK else "bad", prose=True
    )
    call.ui.note(f"{accepted:,} tokens of these answers were drafts", "quiet")
    return code


def _part_cells(part: Part) -> tuple[Any, ...]:
    share = f"{part.share:.1%}" if part.share is not None else None
    numbers = (f"{n:,}" for n in (part.prompts, part.prompt_tokens, part.hit_tokens, part.possible_tokens))
    return (part.name, *numbers, share, "; ".join(part.wrong) or f"same ({part.output_tokens:,})", part.note)


class Conversation:
    """Sends the turns."""

    def __init__(self, call: Invocation, api: Api, model: str, first: int, growth: int, max_tokens: int, seed: int) -> None:
        self._call, self._api, self._seed = call, api, seed
        self._first, self._growth = first, growth
        self._messages: list[dict[str, str]] = []
        self._base: dict[str, Any] = {
            "model": model,
            "temperature": 0,
            "max_tokens": max_tokens,
            "thinking": {"type": "disabled"},
            "session_id": f"check-cache-{seed}",
            "logprobs": True,
        }

    def run(self, turns: int) -> list[Turn]:
        predictor = Predictor()
        results: list[Turn] = []
        target, common = self._first, 0
        with self._call.ui.progress("check-cache", turns) as bar:
            for index in range(1, turns + 1):
                self._messages.append({"role": "user", "content": self._text(index, target)})
                without, with_ = self._ask(False), self._ask(True)
                predicted = predictor.predict(with_.prompt_tokens, common, with_.cached)
                reduced = predictor.without_tails(with_.prompt_tokens, common)
                results.append(compare(self._api, index, without, with_, predicted, reduced))
                predictor.store(with_.prompt_tokens, with_.output_tokens)
                common = with_.prompt_tokens
                target = with_.prompt_tokens + self._growth
                self._messages.append({"role": "assistant", "content": without.content})
                bar.update(index, f"turn {index} of {turns}")
        return results

    def _text(self, index: int, target: int) -> str:
        """A user message that brings the whole prompt to `target` tokens by the server's own count."""

        def count(text: str) -> int:
            body = {
                "model": self._base["model"],
                "messages": [*self._messages, {"role": "user", "content": text}],
                "thinking": self._base["thinking"],
            }
            return self._api.count_tokens(body)

        return sized(f"check-cache {self._seed} {index}", target, count)

    def _ask(self, cached: bool) -> Answer:
        return self._api.chat({**self._base, "messages": self._messages, "prefix_cache": cached})


def compare(api: Api, turn: int, without: Answer, with_: Answer, predicted: int, without_tails: int = 0) -> Turn:
    """Token by token where the server names its tokens, else by its tokenizer."""
    left, right = tokens_of(api, without), tokens_of(api, with_)
    at = first_difference(left, right)
    if at is None and (without.finish_reason, without.output_tokens, without.content) != (
        with_.finish_reason,
        with_.output_tokens,
        with_.content,
    ):
        at = min(len(left), len(right))
    difference = "" if at is None else f"{_at(left, at)} without, {_at(right, at)} with the cache"
    times = without.ttft_s, with_.ttft_s
    return Turn(turn, with_.prompt_tokens, with_.cached, predicted, *times, with_.output_tokens, at, difference, without_tails)


def with_reason(turn: Turn, before: ArenaCounts, after: ArenaCounts) -> Turn:
    """The turn, with what the server's counters say about a hit that is not the predicted one."""
    if turn.cached_tokens == turn.predicted_tokens:
        return turn
    reason = why_not_as_predicted(turn.cached_tokens, turn.predicted_tokens, turn.predicted_without_tails, before, after)
    return dataclasses.replace(turn, reason=reason)


def _at(tokens: list[str], index: int) -> str:
    return repr(tokens[index]) if index < len(tokens) else "the end"


def judge(results: list[Turn], damaged: int) -> ExitCode:
    if damaged > 0 or not all(turn.same for turn in results):
        return ExitCode.NO
    return ExitCode.OK if any(turn.cached_tokens > 0 for turn in results[1:]) else ExitCode.INVALID


def show(call: Invocation, model: str, url: str, results: list[Turn], damaged: int, code: ExitCode) -> None:
    from deepinfer_cli.models import STAMP, is_tiny

    stamp = STAMP if is_tiny(model) else None
    words = {ExitCode.OK: "same tokens with and without the cache", ExitCode.INVALID: "nothing proved: no later turn came from the cache"}
    verdict = words.get(code, "the cache changes the answer" if damaged <= 0 else f"damaged stored pages found: {damaged}")
    if call.json:
        body = {"model": model, "url": url, "turns": [dataclasses.asdict(t) for t in results], "checksum_errors": damaged}
        call.ui.document("dix.check-cache/1", {**body, "verdict": verdict, "exit_code": int(code), "note": stamp})
        return
    heads = ("TURN", "PROMPT", "CACHED", "PREDICTED", "TTFT WITHOUT ms", "TTFT WITH ms", "FASTER")
    columns = [*(Column(head) for head in heads), Column("TOKENS", right=False)]
    call.ui.table(columns, [_cells(turn) for turn in results])
    call.ui.print(f"{verdict} · {model} at {url}" + (f" · {stamp}" if stamp else ""), "good" if code is ExitCode.OK else "bad", prose=True)
    for turn in results:
        if turn.cached_tokens != turn.predicted_tokens:
            call.ui.warn(f"turn {turn.turn}: {turn.cached_tokens} cached tokens, {turn.predicted_tokens} predicted: {turn.reason}")
    if code is ExitCode.INVALID:
        call.ui.note(" hint: is the cache on (dix cache stats), and is its arena large enough?", "accent")


def _cells(turn: Turn) -> tuple[Any, ...]:
    faster = turn.ttft_without_s / turn.ttft_with_s if turn.ttft_with_s > 0 else None
    verdict = f"same ({turn.output_tokens})" if turn.same else f"different at {turn.different_at}: {turn.difference}"
    return (
        turn.turn, f"{turn.prompt_tokens:,}", f"{turn.cached_tokens:,}", f"{turn.predicted_tokens:,}",
        show_number(turn.ttft_without_s * 1e3), show_number(turn.ttft_with_s * 1e3), f"{show_number(faster, 2)}×", verdict,
    )  # fmt: skip


check_cache = command(_check_cache)
