"""A device cache whose bytes are functions of the tokens, so that a restored row can be checked without a model."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence as Tokens

import torch

from engine.request import Request, SamplingParams, Sequence
from hicache.ranking import DEFAULT_PRIORITY


def expand(seed: bytes, num_bytes: int) -> torch.Tensor:
    """`num_bytes` bytes derived from `seed`."""
    return torch.frombuffer(bytearray(hashlib.shake_128(seed).digest(num_bytes)), dtype=torch.uint8)


def digest(tokens: Tokens[int]) -> bytes:
    return hashlib.sha256(",".join(map(str, tokens)).encode()).digest()


class FakeKV:
    """The attributes of `engine.kv_cache.KVCache` that the prefix cache uses."""

    def __init__(
        self,
        block_size: int = 4,
        num_blocks: int = 64,
        block_bytes: int = 96,
        state_bytes: int = 9000,
        num_state_slots: int = 8,
        device: str = "cpu",
        window: int | None = None,
        num_encoder_layers: int = 3,
    ) -> None:
        self.block_size, self.num_blocks, self.num_state_slots = block_size, num_blocks, num_state_slots
        self.blocks = torch.zeros(num_blocks, block_bytes, dtype=torch.uint8, device=device)
        self.state_bytes = state_bytes
        self.window = 2 * block_size if window is None else window
        self.num_encoder_layers = num_encoder_layers
        self.ring_rows = self.window + block_size + 256
        self.format_id = "fake"
        self.tokens_in_slot: dict[int, list[int]] = {}
        self.loaded: dict[int, tuple[int, bytes]] = {}
        self.right_from: dict[int, float] = {}  # slot -> first position with a right window

    def compute(self, seq: Sequence, start: int, end: int) -> None:
        """A forward pass over [start, end): every block row becomes a function of all tokens up to its end.

        A replay leaves the rows before `entries_start`; one that is too short makes all later rows wrong, and no window right.
        """
        enough = seq.entries_start - seq.swa_valid_start > self.num_encoder_layers * (self.window - 1)
        right_from = 0 if not seq.entries_start else seq.entries_start if enough else math.inf
        for block in range(max(start, seq.entries_start) // self.block_size, end // self.block_size):
            tokens = seq.token_ids[: (block + 1) * self.block_size]
            row = self.page_bytes(tokens).to(self.blocks.device)
            self.blocks[seq.block_table[block]] = 255 - row if right_from == math.inf else row
        self.tokens_in_slot[seq.state_slot] = seq.token_ids[:end]
        self.right_from[seq.state_slot] = right_from

    def page_bytes(self, tokens: Tokens[int]) -> torch.Tensor:
        return expand(b"page" + digest(tokens), self.blocks.shape[1])

    def window_bytes(self, tokens: Tokens[int]) -> torch.Tensor:
        return expand(b"state" + digest(tokens), self.state_bytes)

    def save_window(self, slot: int, position: int, out: torch.Tensor) -> None:
        assert position >= self.right_from[slot], f"the window at {position} is right only from {self.right_from[slot]} on"
        out.copy_(self.window_bytes(self.tokens_in_slot[slot][:position]))

    def load_window(self, slot: int, position: int, src: torch.Tensor) -> None:
        self.loaded[slot] = (position, bytes(src.tolist()))


def make_sequence(
    seq_id: int,
    tokens: Tokens[int],
    *,
    read: bool = True,
    write: bool = True,
    salt: str = "",
    scope: str = "",
    priority: int = DEFAULT_PRIORITY,
    seconds: float = math.inf,
    block_size: int = 4,
    first_block: int = 1,
) -> Sequence:
    """A sequence with its blocks and slot allocated."""
    request = Request(
        f"r{seq_id}",
        list(tokens),
        SamplingParams(),
        cache_read=read,
        cache_write=write,
        cache_salt=salt,
        cache_scope=scope,
        cache_priority=priority,
        cache_priority_s=seconds,
    )
    seq = Sequence(seq_id, request, 0.0, 0, list(tokens), len(tokens), len(tokens))
    seq.block_table = list(range(first_block, first_block + -(-len(tokens) // block_size)))
    seq.state_slot = 1
    return seq
