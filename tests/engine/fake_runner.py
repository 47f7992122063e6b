"""A model that is a hash of the tokens it sees *through the cache*: a wrong block table, a missing chunk or a stale window
changes its output. It has real cache tensors, so the real prefix cache works with it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.batch import Batch, LogitRows, SequenceSlice
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


class FakeKV:
    """Blocks of int64 token ids, and rings of the last token ids per state slot."""

    format_id = "fake-int64"

    def __init__(self, limits: FakeLimits, block_size: int, window: int) -> None:
        self.block_size = block_size
        self.num_blocks = limits.num_blocks
        self.num_state_slots = limits.num_state_slots
        self.window = window
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


class FakeRunner:
    """`run(batch)` as the model runner's. `batches` keeps every batch for assertions when `record` is set."""

    def __init__(self, limits: FakeLimits | None = None, block_size: int = 4, window: int = 4, record: bool = True) -> None:
        self.limits = limits or FakeLimits()
        self.kv = FakeKV(self.limits, block_size, window)
        self.batches: list[Batch] = []
        self.record = record
        self._powers = np.cumprod(np.full(4096, 6364136223846793005, dtype=np.uint64))

    def run(self, batch: Batch) -> Tensor:
        assert batch.slices, "an empty batch reached the model"
        assert batch.num_tokens <= max(self.limits.max_num_batched_tokens, self.limits.max_num_seqs)
        _check_exclusive([block for piece in batch.slices for block in piece.block_table])
        _check_exclusive([piece.state_slot for piece in batch.slices])
        if self.record:
            self.batches.append(batch)
        rows = [self._run_slice(piece) for piece in batch.slices]
        wanted = [row for row, piece in zip(rows, batch.slices, strict=True) if piece.logit_rows is LogitRows.LAST]
        return torch.from_numpy(np.stack(wanted)) if wanted else torch.empty(0, self.limits.vocab_size)

    def _run_slice(self, piece: SequenceSlice) -> np.ndarray:
        kv = self.kv
        assert len(piece.block_table) * kv.block_size >= piece.end, "block table too short"
        positions = np.arange(piece.start, piece.end)
        table = np.asarray(piece.block_table)
        kv.tokens[table[positions // kv.block_size], positions % kv.block_size] = piece.token_ids
        kept = positions[-kv.ring_rows :]
        kv.rings[piece.state_slot, kept % kv.ring_rows] = piece.token_ids[-kv.ring_rows :]
        seen = kv.tokens[table].reshape(-1)[: piece.end]
        window = kv.rings[piece.state_slot, np.arange(max(0, piece.end - kv.window), piece.end) % kv.ring_rows]
        return fake_logits(seen, window, piece.history, self.limits.vocab_size, self._powers)


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
