"""Brings a decode step that was planned early up to date with the tokens of the step before it.

A step is planned from committed tokens while its predecessor is still computed. What the predecessor produces moves a slice on: it
starts later, at other tokens. Pure functions of the plan and those tokens; they run where steps run, after the predecessor's sampling.
"""

from __future__ import annotations

from dataclasses import replace

from engine.batch import SequenceSlice
from engine.step import Sampled, Step


def later_rows(step: Step, before: Step) -> list[int]:
    """For each sequence of `step` its row in the step before it, -1 when it had none: then nothing about it is late."""
    rows = {seq.seq_id: row for row, seq in enumerate(before.rows)}
    return [rows.get(seq.seq_id, -1) for seq in step.seqs]


def caught_up(step: Step, rows: list[int], sampled: Sampled, history_len: int) -> Step:
    """The step as it would have been planned behind the tokens in `sampled`. rows: see `later_rows`.

    A sequence that the tokens have ended stays in, since its plan cannot be taken back: it computes one row that nobody reads.
    """
    slices, rooms = list(step.slices), list(step.rooms)
    for i, row in enumerate(rows):
        if row < 0 or row in sampled.errors:
            continue
        # Blocks and length limits end with the room; tokens beyond it belong to a sequence that has ended.
        tokens = sampled.token_ids[row][: rooms[i]]
        slices[i] = advanced(slices[i], tokens, history_len)
        rooms[i] -= len(tokens)
    return replace(step, slices=slices, rooms=rooms)


def advanced(piece: SequenceSlice, tokens: list[int], history_len: int) -> SequenceSlice:
    """A decode slice after `tokens` have been appended to its sequence."""
    if not tokens:
        return piece
    tail = (*piece.history, *piece.token_ids, *tokens)
    return SequenceSlice(
        token_ids=tokens[-1:],
        start=piece.start + len(tokens),
        total_len=piece.total_len + len(tokens),
        block_table=piece.block_table,
        state_slot=piece.state_slot,
        history=tail[max(0, len(tail) - 1 - history_len) : -1],
        swa_valid_start=piece.swa_valid_start,
        logit_rows=piece.logit_rows,
    )
