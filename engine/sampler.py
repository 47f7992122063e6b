"""From logits to tokens: exact greedy, or one draw per row (`engine/draws.py`) with numbers keyed by seed and position.

Order of operations per row: ids without a token masked, edits of the raw logits (`engine/logit_edits.py`), grammar mask
(`engine/structured_output.py`), temperature, top-p, top-k, min-p, draw. Every operation works on a row alone, so a row's token does
not depend on its batch. Requests with a seed draw by a race, which speculation can follow token for token; others by inverse CDF.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from engine.choices import Drawing, row_choices, step_choices
from engine.distribution import device_filters, probabilities
from engine.draws import fixed_point, inverse_cdf, race
from engine.forced_accept import ForcedAccept
from engine.logit_edits import LogitEdits
from engine.logprobs import logprobs_of
from engine.ops.sample_rows import SAMPLE_ROWS, Draws, Mode, largest_rows, sample_rows
from engine.random_keys import Purpose, draws53, race_keys
from engine.readout import Largest, Readout, row_errors, to_device
from engine.request import SamplingTraits, Sequence
from engine.spec_decode import NO_PROPOSALS, DraftedRows, Proposals, accepted_prefix, reject
from engine.step import Sampled
from engine.structured_output import RowMasks, apply_masks, draft_masks, row_masks


class Sampler:
    """Chooses one token per row. Ids from `num_tokens` on have no token in the tokenizer and are never chosen."""

    def __init__(
        self,
        num_tokens: int,
        eos_token_ids: frozenset[int],
        forced: ForcedAccept | None = None,
        drawing: Callable[[], Drawing | None] = lambda: None,
    ) -> None:
        """forced: decides instead of the model how many drafts a verification keeps. drawing: who draws in compiled code, None while torch
        does; all rows of a batch draw in one place, so that none depends on the others.
        """
        self.num_tokens = num_tokens
        self.forced = forced
        self._drawing = drawing
        self._edits = LogitEdits(eos_token_ids)
        self.poison_next_row = False  # fault injection: the next step's first row becomes NaN

    def __call__(self, logits: Tensor, rows: list[Sequence]) -> Sampled:
        """logits: [R, V] fp32; may be changed in place at ids without a token. rows: the R sequences, in order.

        A row with NaN, +inf or nothing but -inf gets an error and harms no other row.
        """
        self._prepare(logits, rows)
        if _all_plain(rows):
            return take_largest(_greedy(logits))
        return self._sample(logits, rows, [seq.traits for seq in rows])

    @torch.inference_mode()
    def _sample(self, logits: Tensor, rows: list[Sequence], traits: list[SamplingTraits]) -> Sampled:
        masks = row_masks(rows, logits.shape[1])
        work, errors = self._constrain(logits, rows, traits, masks)
        tokens = self._choose(work, rows, _drawn(traits, errors))
        wanted = [i for i, t in enumerate(traits) if t.logprobs and i not in errors]
        logprobs = logprobs_of(logits, tokens, rows, wanted)
        return Sampled([[token] for token in tokens], {i: [entry] for i, entry in logprobs.items()}, errors)

    @torch.inference_mode()
    def enqueue(self, logits: Tensor, rows: list[Sequence]) -> Readout | None:
        """As a call, but without waiting for the device. None when a row needs the host in between: edits, grammars, filters."""
        self._prepare(logits, rows)
        traits = [seq.traits for seq in rows]
        kernel = logits.is_cuda and SAMPLE_ROWS.backend != "reference"  # which filters as well
        if any(seq.matcher is not None for seq in rows) or not all(t.on_device or (kernel and t.plain_drawn) for t in traits):
            return None
        if kernel and any(t.plain_drawn for t in traits):
            return Readout(*sample_rows(logits, row_draws(rows, logits.device), self.num_tokens))
        best, ids = _largest(logits)
        drawn = [i for i, t in enumerate(traits) if not t.greedy]
        if drawn:
            index = to_device(drawn, torch.int64, logits.device)
            ids[index] = draw(logits[index], [rows[i] for i in drawn])
        # A failed row's id is the next step's input all the same: it has to exist.
        return Readout(ids.clamp_(0, min(self.num_tokens, logits.shape[1]) - 1), best)

    def verify(self, logits: Tensor, seqs: list[Sequence], drafts: list[list[int]], proposals: Proposals) -> Sampled:
        """Keep the drafts that the model would have produced, and one token behind them.

        logits: [R, V] fp32, rows of sequence 0 behind its last token and behind each of its drafts, then sequence 1 and so on.
        The result has one entry per sequence.
        """
        self._prepare(logits, seqs, sum(map(len, drafts)))
        if _all_plain(seqs):
            return self.verify_largest(_greedy(logits), seqs, drafts)
        return self._verify(logits, seqs, drafts, proposals)

    def verify_largest(self, largest: Largest, seqs: list[Sequence], drafts: list[list[int]]) -> Sampled:
        """As `verify`, of rows of which nobody wants more."""
        counts = None
        if self.forced is not None:
            rows = DraftedRows.of(seqs, drafts)
            counts = self.forced.apply(seqs, drafts, largest.ids, [draft < self.num_tokens for draft in rows.drafts])
        return _kept_tokens(drafts, largest.ids, largest.errors, counts)

    @torch.inference_mode()
    def _verify(self, logits: Tensor, seqs: list[Sequence], drafts: list[list[int]], proposals: Proposals) -> Sampled:
        masks = draft_masks(seqs, drafts, logits.shape[1])
        rows = DraftedRows.of(seqs, drafts)
        traits = [seq.traits for seq in rows.seqs]
        work, errors = self._constrain(logits, rows.seqs, traits, masks, rows.ahead)
        tokens = self._judge(work, rows, _drawn(traits, errors), proposals)
        counts = None
        if self.forced is not None:
            judged = work.gather(1, torch.tensor(rows.drafts, device=work.device).clamp_(min=0)[:, None])[:, 0]
            counts = self.forced.apply(seqs, drafts, tokens, (judged > float("-inf")).tolist())
        sampled = _kept_tokens(drafts, tokens, errors, counts)
        reached = [
            (k, begin + j)
            for k, begin in enumerate(rows.begins)
            if traits[begin].logprobs and k not in sampled.errors
            for j in range(len(sampled.token_ids[k]))
        ]
        entries = logprobs_of(logits, tokens, rows.seqs, [i for _, i in reached])
        for k, i in reached:
            sampled.logprobs.setdefault(k, []).append(entries[i])
        return sampled

    def _prepare(self, logits: Tensor, rows: list[Sequence], num_drafts: int = 0) -> None:
        assert logits.shape[0] == len(rows) + num_drafts, f"{logits.shape[0]} rows of logits for {len(rows)} sequences, {num_drafts} drafts"
        if self.num_tokens < logits.shape[1] or (self.poison_next_row and rows):
            self._spoil(logits, rows)

    @torch.inference_mode()
    def _spoil(self, logits: Tensor, rows: list[Sequence]) -> None:
        """Exclude ids without a token, and break the first row when a fault is injected."""
        logits[:, self.num_tokens :] = float("-inf")
        if self.poison_next_row and rows:
            self.poison_next_row = False
            logits[0] = float("nan")

    def wants_largest(self, seqs: list[Sequence]) -> bool:
        """Whether the largest logit of every row is all that anybody wants to know of a step: see `take_largest`."""
        return not self.poison_next_row and _all_plain(seqs)

    def wants_tokens(self, seqs: list[Sequence]) -> bool:
        """Whether compiled code can choose the tokens of a step, and nobody wants to know more."""
        if self._drawing() is None or self.poison_next_row:
            return False
        return all((seq.traits.plain_greedy or seq.traits.plain_drawn) and seq.matcher is None for seq in seqs)

    def _choose(self, logits: Tensor, rows: list[Sequence], drawn: list[int]) -> list[int]:
        """The token of every row; `drawn` need a random number."""
        drawing = self._drawing()
        if drawing is not None:
            return drawing.choose(logits, step_choices(rows, [len(seq.token_ids) for seq in rows], [], NO_PROPOSALS))
        chosen = logits.argmax(dim=-1)
        if drawn:
            index = torch.tensor(drawn, device=logits.device)
            chosen[index] = draw(logits[index], [rows[i] for i in drawn])
        return chosen.tolist()

    def _judge(self, logits: Tensor, rows: DraftedRows, drawn: list[int], proposals: Proposals) -> list[int]:
        """As `_choose`, for rows of which some keep or refuse the draft that was made for them."""
        drawing = self._drawing()
        if drawing is not None:
            places = [len(ids) for ids in rows.ahead]
            positions = [len(seq.token_ids) + place for seq, place in zip(rows.seqs, places, strict=True)]
            return drawing.choose(logits, row_choices(rows.seqs, positions, rows.drafts, places, proposals))
        tokens: list[int] = logits.argmax(dim=-1).tolist()
        if drawn:
            verified = _verified(logits[torch.tensor(drawn, device=logits.device)], rows, drawn, proposals)
            for i, token in zip(drawn, verified, strict=True):
                tokens[i] = token
        return tokens

    def _constrain(
        self,
        logits: Tensor,
        rows: list[Sequence],
        traits: list[SamplingTraits],
        masks: RowMasks | None,
        ahead: list[list[int]] | None = None,
    ) -> tuple[Tensor, dict[int, str]]:
        """Logits after edits and grammars, and the rows that cannot be used. ahead: drafts between a sequence and its row."""
        errors = row_errors(logits.amax(dim=-1))
        work = self._edited(logits, rows, traits, ahead)
        if masks is None:
            return work, errors if work is logits else row_errors(work.amax(dim=-1)) | errors
        work = _constrained(logits, work, masks)
        best = work.amax(dim=-1)
        empty = (best == float("-inf")).nonzero()[:, 0].tolist()
        return work, row_errors(best) | dict.fromkeys(empty, "the grammar allows no token") | masks.errors | errors

    def _edited(self, logits: Tensor, rows: list[Sequence], traits: list[SamplingTraits], ahead: list[list[int]] | None = None) -> Tensor:
        """A copy with the edited rows, or the same tensor when no row needs an edit: raw log-probabilities read the original."""
        if not any(t.edits for t in traits):
            return logits
        work = logits.clone()
        for i, (seq, t) in enumerate(zip(rows, traits, strict=True)):
            if t.edits:
                self._edits.apply(work[i], seq, ahead[i] if ahead else ())
        return work


def _all_plain(seqs: list[Sequence]) -> bool:
    return all(seq.traits.plain_greedy and seq.matcher is None for seq in seqs)


def _constrained(logits: Tensor, work: Tensor, masks: RowMasks) -> Tensor:
    """`work` with the grammars' masks, as a tensor that is not `logits`: raw log-probabilities read that one.

    Where the edits leave nothing that a grammar allows (before min_tokens, when only the end may follow), the grammar wins.
    """
    work = logits.clone() if work is logits else work
    apply_masks(work, masks)
    index = torch.tensor(masks.rows, dtype=torch.int64, device=work.device)
    empty = index[work[index].amax(dim=-1) == float("-inf")] if masks.rows else index
    if len(empty):
        work[empty] = logits[empty]
        apply_masks(work, masks)
    return work


def _largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row, NaN before all others, and its id, the first of equals. logits: [R, V]. Returns [R], [R] int64."""
    if logits.device.type != "cpu":
        ids, best = largest_rows(logits)
        return best, ids
    # numpy's arg-max is vectorised, many times as fast as torch's.
    table = logits.numpy()
    places = table.argmax(axis=-1)
    return torch.from_numpy(table[np.arange(len(places)), places]), torch.from_numpy(places)


def _greedy(logits: Tensor) -> Largest:
    """logits: [R, V], ids without a token masked."""
    best, ids = _largest(logits)
    return Largest(ids.tolist(), best.tolist())


def take_largest(largest: Largest) -> Sampled:
    """What the sampler makes of rows of which nobody wants more."""
    return Sampled([[token] for token in largest.ids], errors=largest.errors)


def draw(logits: Tensor, rows: list[Sequence]) -> Tensor:
    """One token per row from the tempered and filtered distribution. logits: [B, V], finite maximum. Returns [B] int64."""
    probs = probabilities(logits, [seq.request.params for seq in rows])
    return draw_tokens(probs, rows, [len(seq.token_ids) for seq in rows])


def draw_tokens(probs: Tensor, rows: list[Sequence], positions: list[int]) -> Tensor:
    """One token per row. probs: [B, V] fp32, see `probabilities`. positions: absolute indexes of the tokens to be drawn."""
    device = probs.device
    seeds = [seq.seed for seq in rows]
    seeded = [i for i, seq in enumerate(rows) if seq.request.params.seed is not None]
    if len(seeded) == len(rows):
        return race(probs, to_device(race_keys(seeds, positions).tolist(), torch.int64, device))
    tokens = inverse_cdf(fixed_point(probs), to_device(draws53(seeds, positions).tolist(), torch.int64, device))
    if seeded:
        index = to_device(seeded, torch.int64, device)
        keys = race_keys([seeds[i] for i in seeded], [positions[i] for i in seeded])
        tokens[index] = race(probs[index], to_device(keys.tolist(), torch.int64, device))
    return tokens


def row_draws(rows: list[Sequence], device: torch.device) -> Draws:
    """What every row draws with on the device, see `draw_tokens`."""
    params = [seq.request.params for seq in rows]
    seeds, positions = [seq.seed for seq in rows], [len(seq.token_ids) for seq in rows]
    modes = [Mode.GREEDY if p.temperature == 0.0 else Mode.INVERSE if p.seed is None else Mode.RACE for p in params]
    chosen = np.where([mode is Mode.RACE for mode in modes], race_keys(seeds, positions), draws53(seeds, positions)).tolist()
    return Draws(
        to_device([p.temperature for p in params], torch.float32, device),
        to_device([int(mode) for mode in modes], torch.int32, device),
        to_device(chosen, torch.int64, device),
        device_filters(params, device) if any(p.is_filtered for p in params) else None,
        frozenset(modes),
    )


def _drawn(traits: list[SamplingTraits], errors: dict[int, str]) -> list[int]:
    """Rows that need a random number."""
    return [i for i, t in enumerate(traits) if not t.greedy and i not in errors]


def _verified(logits: Tensor, rows: DraftedRows, drawn: list[int], proposals: Proposals) -> list[int]:
    """Tokens of the rows `drawn`; logits: [len(drawn), V]. Seeded rows and rows without a draft draw, the others keep or refuse theirs."""
    seqs = [rows.seqs[i] for i in drawn]
    positions = [len(seq.token_ids) + len(rows.ahead[i]) for seq, i in zip(seqs, drawn, strict=True)]
    probs = probabilities(logits, [seq.request.params for seq in seqs])
    judged: list[int] = []
    plain: list[int] = []
    for k, i in enumerate(drawn):
        (judged if rows.drafts[i] >= 0 and seqs[k].request.params.seed is None else plain).append(k)
    tokens = [0] * len(drawn)
    if plain:
        drawn_tokens = draw_tokens(probs[torch.tensor(plain, device=probs.device)], [seqs[k] for k in plain], [positions[k] for k in plain])
        for k, token in zip(plain, drawn_tokens.tolist(), strict=True):
            tokens[k] = token
    if judged:
        seeds, places = [seqs[k].seed for k in judged], [positions[k] for k in judged]
        kept = reject(
            probs[torch.tensor(judged, device=probs.device)],
            proposals.rows([(seqs[k].seq_id, len(rows.ahead[drawn[k]])) for k in judged]),
            [rows.drafts[drawn[k]] for k in judged],
            draws53(seeds, places, Purpose.ACCEPT).tolist(),
            draws53(seeds, places, Purpose.RESIDUAL).tolist(),
        )
        for k, token in zip(judged, kept, strict=True):
            tokens[k] = token
    return tokens


def _kept_tokens(drafts: list[list[int]], tokens: list[int], errors: dict[int, str], counts: list[int] | None = None) -> Sampled:
    """The rows of every sequence up to the first whose token is not its draft. An error in a row that is reached fails the sequence.

    counts: how many drafts each sequence keeps when that is decided elsewhere.
    """
    kept: list[list[int]] = []
    failed: dict[int, str] = {}
    begin = 0
    for k, ids in enumerate(drafts):
        count = 1 + (accepted_prefix(ids, tokens[begin : begin + len(ids)]) if counts is None else counts[k])
        kept.append(tokens[begin : begin + count])
        if errors:
            bad = next((i for i in range(begin, begin + count) if i in errors), None)
            if bad is not None:
                failed[k] = errors[bad]
        begin += len(ids) + 1
    return Sampled(kept, errors=failed, drafted=[len(ids) for ids in drafts])
