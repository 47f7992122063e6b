"""A model that is a hash of the tokens it sees *through the cache*: a wrong block table, a missing chunk or a stale window
changes its output. It has real cache tensors, so the real prefix cache works with it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import numpy as np
import torch
from torch import Tensor

from engine.batch import Batch, LogitRows, SequenceSlice
from engine.models.draft import Choose, DraftSlice
from engine.random_keys import GOLDEN, _mix64_rows, mix64


@dataclass(frozen=True, slots=True)
class FakeLimits:
    max_model_len: int = 64
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 16
    num_blocks: int = 24
    num_state_slots: int = 6
    vocab_size: int = 32
    tokenizer_size: int = 10**6
    eos_token_id: int = 1
    keep_tokens: int = 0
    ngram_history: int = 2
    mode: str = "off"
    precision: str = "F"
    device: str = "cpu"
    fingerprint: str = "fake"
    draft_block_size: int = 0


class FakeKV:
    """Blocks of int64 token ids, and rings of the last token ids per state slot."""

    format_id = "fake-int64"

    def __init__(self, limits: FakeLimits, block_size: int, window: int) -> None:
        self.block_size = block_size
        self.num_blocks = limits.num_blocks
        self.num_state_slots = limits.num_state_slots
        self.window = window
        self.num_encoder_layers = 1
        self.ring_rows = window + 6 + block_size + limits.keep_tokens
        self.state_bytes = window * 8
        garbage = np.random.default_rng(7).integers(100, 200, (limits.num_blocks, block_size))
        self.blocks = torch.from_numpy(garbage).view(torch.uint8)
        self.tokens = self.blocks.numpy().view(np.int64)  # [N, block_size]
        self.rings = np.random.default_rng(8).integers(100, 200, (limits.num_state_slots, self.ring_rows))

    def _rows(self, position: int) -> np.ndarray:
        return np.arange(position - self.window, position) % self.ring_rows

    def save_window(self, slot: int, position: int, out: Tensor) -> None:
        out.copy_(torch.from_numpy(self.rings[slot, self._rows(position)].copy()).view(torch.uint8))

    def load_window(self, slot: int, position: int, src: Tensor) -> None:
        self.rings[slot, self._rows(position)] = src.numpy().view(np.int64)


@dataclass(frozen=True, slots=True)
class FakeDrafts:
    token_ids: Tensor
    confidence: Tensor
    logits: Tensor


class FakeRunner:
    """`run(batch)` and `draft(slices)` as the model runner's. `batches` keeps every batch for assertions when `record` is set.

    Drafts come from the model's own logits plus `draft_noise` times another hash: 0 drafts what greedy decoding will choose.
    """

    def __init__(
        self,
        limits: FakeLimits | None = None,
        block_size: int = 4,
        window: int = 4,
        record: bool = True,
        draft_noise: float = 0.0,
    ) -> None:
        self.limits = limits or FakeLimits()
        self.kv = FakeKV(self.limits, block_size, window)
        self.batches: list[Batch] = []
        self.record = record
        self.draft_noise = draft_noise
        self.num_drafts = 0
        self._seen: dict[int, np.ndarray] = {}  # state slot -> tokens of the sequence that ran in it last
        self._powers = np.cumprod(np.full(4096, 6364136223846793005, dtype=np.uint64))

    def run(self, batch: Batch) -> Tensor:
        assert batch.slices, "an empty batch reached the model"
        most = self.limits.max_num_seqs * (1 + self.limits.draft_block_size)
        assert batch.num_tokens <= max(self.limits.max_num_batched_tokens, most)
        _check_exclusive([block for piece in batch.slices for block in piece.block_table])
        _check_exclusive([piece.state_slot for piece in batch.slices])
        if self.record:
            self.batches.append(batch)
        if batch.late is not None:
            ids = batch.late.ids.tolist()
            slices = [
                piece if row < 0 else msgspec.structs.replace(piece, token_ids=[ids[row]])
                for piece, row in zip(batch.slices, batch.late.rows, strict=True)
            ]
            batch = replace(batch, slices=slices)
        wanted = [row for piece in batch.slices for row in self._run_slice(piece)]
        return torch.from_numpy(np.stack(wanted)) if wanted else torch.empty(0, self.limits.vocab_size)

    def _run_slice(self, piece: SequenceSlice) -> list[np.ndarray]:
        kv = self.kv
        assert len(piece.block_table) * kv.block_size >= piece.end, "block table too short"
        positions = np.arange(piece.start, piece.end)
        table = np.asarray(piece.block_table)
        kv.tokens[table[positions // kv.block_size], positions % kv.block_size] = piece.token_ids
        kept = positions[-kv.ring_rows :]
        kv.rings[piece.state_slot, kept % kv.ring_rows] = piece.token_ids[-kv.ring_rows :]
        seen = kv.tokens[table].reshape(-1)[: piece.end].copy()
        self._seen[piece.state_slot] = seen
        first = {LogitRows.NONE: piece.end, LogitRows.LAST: piece.end - 1, LogitRows.ALL: piece.start}[piece.logit_rows]
        return [self._logits(seen[: i + 1], self._window(piece.state_slot, i + 1), piece.history) for i in range(first, piece.end)]

    def _window(self, slot: int, end: int) -> np.ndarray:
        return self.kv.rings[slot, np.arange(max(0, end - self.kv.window), end) % self.kv.ring_rows]

    def _logits(self, seen: np.ndarray, window: np.ndarray, history: tuple[int, ...]) -> np.ndarray:
        return fake_logits(seen, window, history, self.limits.vocab_size, self._powers)

    def run_greedy(self, batch: Batch) -> Tensor:
        return self.run(batch)

    def draft(self, slices: list[DraftSlice], choose: Choose | None = None) -> FakeDrafts:
        _check_exclusive([piece.state_slot for piece in slices])
        size = self.limits.draft_block_size
        self.num_drafts += 1
        texts = []
        for piece in slices:
            known = self._seen[piece.state_slot][: piece.position + 1]
            assert len(known) == piece.position + 1, "drafts behind tokens that were not computed"
            assert (self._window(piece.state_slot, piece.position + 1) == known[-self.kv.window :]).all(), "stale draft window"
            texts.append([*known.tolist(), piece.token_id])
        ids, confidence, logits = [], [], []
        for place in range(size):
            rows = torch.from_numpy(np.stack([self.draft_logits(text) for text in texts]))
            confidence.append([mix64(sum(text) * 31 + place) % 1000 / 200 - 1.0 for text in texts])
            chosen = rows.argmax(-1) if choose is None else choose(place, rows.clone())
            for text, token in zip(texts, chosen.tolist(), strict=True):
                text.append(token)
            ids.append(chosen)
            logits.append(rows)
        return FakeDrafts(torch.stack(ids, 1), torch.tensor(confidence).T, torch.stack(logits, 1))

    def draft_greedy(self, slices: list[DraftSlice]) -> tuple[list[list[int]], list[list[float]]]:
        output = self.draft(slices)
        return output.token_ids.tolist(), output.confidence.tolist()

    def draft_logits(self, text: list[int]) -> np.ndarray:
        """[V] fp32: the model's logits behind `text`, disturbed."""
        seen = np.asarray(text)
        other = self._logits(seen + 1, seen[-1:], ())
        return self._logits(seen, seen[-self.kv.window :], ()) + np.float32(self.draft_noise) * other


def _check_exclusive(ids: list[int]) -> None:
    assert min(ids) > 0, f"reserved or missing id in {ids}"
    assert len(set(ids)) == len(ids), f"shared id in {ids}"


def fake_logits(seen: np.ndarray, window: np.ndarray, history: tuple[int, ...], vocab_size: int, powers: np.ndarray) -> np.ndarray:
    """[V] fp32 in [0, 8), a hash of all tokens and of the window. `history` must be the tokens before the slice."""
    key = int((seen.astype(np.uint64) * powers[: len(seen)]).sum()) ^ mix64(int((window.astype(np.uint64) * powers[: len(window)]).sum()))
    hashes = _mix64_rows(np.arange(vocab_size, dtype=np.uint64) * np.uint64(GOLDEN) + np.uint64(mix64(key & (2**64 - 1))))
    return ((hashes >> np.uint64(40)).astype(np.float32)) / 2**21


def expected_greedy(prompt: list[int], count: int, limits: FakeLimits, window: int = 4) -> list[int]:
    """What the fake model generates without any cache, EOS included as the last token."""
    powers = np.cumprod(np.full(4096, 6364136223846793005, dtype=np.uint64))
    tokens = list(prompt)
    for _ in range(count):
        seen = np.asarray(tokens)
        tokens.append(int(fake_logits(seen, seen[-window:], (), limits.vocab_size, powers).argmax()))
        if tokens[-1] == limits.eos_token_id or len(tokens) > limits.max_model_len:
            break
    return tokens[len(prompt) :]
