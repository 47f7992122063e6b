"""The programme of `dix check-cache --programme`: generated conversations and injected faults, every prompt without and with the cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from deepinfer_cli.api import RequestRefused
from deepinfer_cli.cache_rule import PAGE, cap
from deepinfer_cli.cache_trial import Part, Trial

GROWTH = (1, 2, 11, 24, 64, 127, 128, 139, 140, 141, 300, 1000, 3000)  # tokens by which a conversation grows, about
LENGTH_PAGES = (1, 2, 3, 20)  # page counts around which every length of a prompt that matters is tried
LONG_PAGES, LONG_LOOPS = 100, 100  # also tried from that many loops on: on a CPU it takes minutes
LENGTH_OFFSETS = (-1, 0, 1, 139, 140, 141)  # a whole page, one more token, and the tokens that are always computed
EDITS = ((0, 0.3), (0, 0.9), (2, 0.5), (2, 0.99))  # message, and how far into it a word is replaced
LEAST_KEPT = 0.95  # of the hits before a rank was killed
DELAY_S = 0.3
FAULTS = ("flip", "drop", "short", "delay")


def run_programme(trial: Trial, on_part: Callable[[str], None]) -> list[Part]:
    """All parts, in order. A part that the server does not offer says so in its note."""
    parts = []
    for name, play in PARTS.items():
        on_part(name)
        parts.append(trial.run(name, play, counts=name != "aborts"))  # an answer that was left brings no usage
    return parts


def growth(trial: Trial) -> None:
    """A conversation that grows by 1 to 3,000 tokens: within the last message when that is too little for a turn."""
    messages = [trial.user(60)]
    trial.compare(messages)
    for tokens in GROWTH:
        if tokens < 100:
            messages[-1] = {"role": "user", "content": messages[-1]["content"] + " " + trial.words(tokens)}
        else:
            messages += [{"role": "assistant", "content": trial.compare(messages)}, {"role": "user", "content": trial.words(tokens)}]
        trial.compare(messages)


def lengths(trial: Trial) -> None:
    """Prompts of every length around a page's end and around the tokens that are always computed: first, and again."""
    missed = 0
    for pages in (*LENGTH_PAGES, *([LONG_PAGES] if trial.loops >= LONG_LOOPS else [])):
        for offset in LENGTH_OFFSETS:
            length = PAGE * pages + offset
            messages = trial.of_length(length)
            if messages is None:
                missed += 1
                continue
            cold = trial.ask(messages, cached=False)
            for possible in (0, cap(length)):
                warm = trial.ask(messages, cached=True)
                trial.note_answer(warm, cold)
                trial.credit(warm.cached, possible)
                if warm.cached > possible:
                    trial.part.wrong.append(f"{warm.cached} cached tokens of {length}, {possible} are possible")
    trial.part.note = f"{missed} lengths are out of this model's reach" if missed else ""


def determinism(trial: Trial) -> None:
    """One prompt, forgotten and asked twice, over and over: all answers are the same."""
    messages = [trial.user(40)]
    first = trial.ask(messages, cached=False)
    for _ in range(trial.loops):
        trial.forget()
        for possible in (0, cap(first.prompt_tokens)):
            warm = trial.ask(messages, cached=True)
            trial.note_answer(warm, first)
            trial.credit(warm.cached, possible)


def resend(trial: Trial) -> None:
    """The same prompt again, and once more."""
    for length in (20, 30, 41, 80):
        messages = [trial.user(length)]
        for _ in range(3):
            trial.compare(messages)


def edits(trial: Trial, *, again: bool = False) -> None:
    """Words replaced in the middle of what was sent, one after the other.

    A prompt that leaves a known path for the first time finds no state there, only those that earlier prompts left behind them; its own
    prefill then keeps one at that point. again: every word is replaced a second time, by another one, and only those prompts count.
    """
    messages = [trial.user(40), {"role": "assistant", "content": trial.words(150)}, trial.user(40)]
    trial.compare(messages, credit=not again)
    for at, share in EDITS:
        words = messages[at]["content"].split()
        for word in ("edited", "changed") if again else ("edited",):
            words[int(share * (len(words) - 1))] = word
            messages[at] = {"role": "user", "content": " ".join(words)}
            trial.compare(messages, credit=word == "changed" or not again)


def forks(trial: Trial) -> None:
    """Branches that share a system text, and branches of branches; each is visited twice."""
    root = [{"role": "system", "content": trial.words(700)}]
    for _ in range(3):
        branch = [*root, trial.user(20)]
        trial.compare(branch)
        for _ in range(2):
            trial.compare([*branch, {"role": "assistant", "content": "Yes."}, trial.user(15)])


def tenants(trial: Trial) -> None:
    """Two tenants with one prompt: the second finds nothing of the first one's, nor does a request without a tenant."""
    messages = [trial.user(40)]
    cold = trial.ask(messages, cached=False)
    try:
        own = [trial.ask(messages, cached=True, cache_salt="one") for _ in range(2)]
    except RequestRefused as error:
        trial.part.note = f"one tenant only (hicache.isolation is not field): {error.status}"
        return
    trial.credit(own[1].cached, cap(cold.prompt_tokens))
    others = [trial.ask(messages, cached=True, cache_salt="two"), trial.ask(messages, cached=True)]
    for warm in (*own, *others):
        trial.note_answer(warm, cold)
    for warm in others:
        if warm.cached:
            trial.part.wrong.append(f"a tenant found {warm.cached} tokens that another one stored")


def reset(trial: Trial) -> None:
    """A cache that is emptied while an answer is being written: the answer stays, and nothing of it is found afterwards."""
    messages = [trial.user(60)]
    whole = trial.ask(messages, cached=False)
    trial.note_answer(trial.ask_and_forget(messages), whole)
    again = trial.ask(messages, cached=True)
    trial.note_answer(again, whole)
    if again.cached:
        trial.part.wrong.append(f"{again.cached} tokens were found that had been forgotten")


def aborts(trial: Trial) -> None:
    """Streams that the client leaves before their first token, then the same prompt to its end."""
    for length in (40, 90):
        messages = [trial.user(length)]
        trial.leave(messages)
        trial.compare(messages, credit=False)
        trial.compare(messages)


def pressure(trial: Trial) -> None:
    """Prompts that share nothing until the arena evicts, and the first of them again in between."""
    kept = [trial.user(60)]
    trial.compare(kept)
    before = trial.evictions()
    for number in range(60):
        trial.ask([trial.user(250)], cached=True)
        if number % 6 == 5:
            trial.compare(kept, credit=False)
            if trial.evictions() > before:
                break
    evicted = trial.evictions() - before
    trial.part.note = f"{evicted:,} pages evicted" if evicted else "the arena is too large to fill here"


def restart(trial: Trial) -> None:
    """All ranks are killed; their successors find what was stored."""
    talks = [[trial.user(length)] for length in (30, 60, 90)]
    colds = [trial.ask(messages, cached=False) for messages in talks]
    before = [[trial.ask(messages, cached=True).cached for messages in talks] for _ in range(2)][1]
    killed = trial.incarnations()
    if not trial.inject("exit"):
        return
    if not trial.await_restart(killed):
        trial.part.wrong.append("the ranks did not come back")
        return
    for messages, cold, possible in zip(talks, colds, before, strict=True):
        warm = trial.ask(messages, cached=True)
        trial.note_answer(warm, cold)
        trial.credit(warm.cached, possible)
    pages = trial.recovered_pages()
    trial.part.note = f"{pages:,} pages taken over" if pages else "the arena did not survive (hicache.segment is private?)"
    if pages and trial.part.hit_tokens < LEAST_KEPT * trial.part.possible_tokens:
        trial.part.wrong.append(f"{trial.part.hit_tokens} tokens hit after the restart, {trial.part.possible_tokens} before")


def fault(trial: Trial, kind: str) -> None:
    """Harm one stored prompt and look at whether the server notices and still answers with the same tokens."""
    messages = [trial.user(38)]
    rank = trial.find_rank()
    cold = trial.ask(messages, cached=False)
    if kind in ("flip", "delay"):
        trial.ask(messages, cached=True)
    if not trial.inject(kind, rank=rank, **({"seconds": DELAY_S} if kind == "delay" else {})):
        return
    if kind in ("drop", "short"):
        trial.ask(messages, cached=True)
    errors = trial.errors()
    warm = trial.ask(messages, cached=True)
    trial.note_answer(warm, cold)
    noticed = trial.errors() - errors
    if kind == "delay":
        if warm.cached == 0 or warm.ttft_s < DELAY_S:
            trial.part.wrong.append(f"the delay did not show: {warm.cached} cached tokens after {warm.ttft_s:.2f} s")
    elif noticed == 0 or warm.cached:
        trial.part.wrong.append(f"went unnoticed: {noticed} checksum errors, {warm.cached} cached tokens")
    trial.note_answer(trial.ask(messages, cached=True), cold)
    trial.part.note = f"checksum errors: {noticed}" if kind != "delay" else f"first token after {warm.ttft_s:.2f} s"


PARTS: dict[str, Callable[[Trial], None]] = {
    "growth": growth,
    "lengths": lengths,
    "determinism": determinism,
    "resend": resend,
    "edits": edits,
    "edits again": partial(edits, again=True),
    "forks": forks,
    "tenants": tenants,
    "reset": reset,
    "aborts": aborts,
    "pressure": pressure,
    "restart": restart,
    **{f"fault {kind}": partial(fault, kind=kind) for kind in FAULTS},
}
