"""Host numbers on their way to fixed device buffers: pinned staging, one copy a step, and the block tables that stay on the device."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

# A buffer is written again when its copy is this many steps old; it has long been made then.
_NUM_STAGES = 3
# Entries at the end of a table that are compared again: a step may take back what refused drafts had been given.
_TAIL = 8


class StagedRows:
    """`num_fields` integers for each of up to `max_rows` rows, copied to the device in one piece.

    values: int32 [max_rows, num_fields] on the device, always at the same address.
    """

    def __init__(self, max_rows: int, num_fields: int, device: torch.device) -> None:
        self.values = torch.zeros(max_rows, num_fields, dtype=torch.int32, device=device)
        self._pinned = device.type == "cuda"
        self._stages = [torch.zeros(max_rows, num_fields, dtype=torch.int32, pin_memory=self._pinned) for _ in range(_NUM_STAGES)]
        self._copied: list[torch.cuda.Event | None] = [None] * _NUM_STAGES
        self._next = 0

    def upload(self, rows: NDArray[np.int32], size: int) -> None:
        """Send `rows` [n, num_fields]; rows n..size-1 become zeros, which is what padding is made of."""
        number, self._next = self._next, (self._next + 1) % _NUM_STAGES
        event, stage = self._copied[number], self._stages[number]
        if event is not None:
            event.synchronize()
        host = stage.numpy()
        host[: len(rows)] = rows
        host[len(rows) : size] = 0
        self.values[:size].copy_(stage[:size], non_blocking=True)
        if self._pinned:
            event = event or torch.cuda.Event()
            event.record()
            self._copied[number] = event


class DeviceTables:
    """Block tables of all state slots on the device. A step sends only what changed since the slot's last step.

    values: int32 [num_slots, max_blocks]; entries behind a table's end are stale, nobody reads them. Row 0 stays 0: padding.
    """

    def __init__(self, num_slots: int, max_blocks: int, device: torch.device) -> None:
        self.values = torch.zeros(num_slots, max_blocks, dtype=torch.int32, device=device)
        self._known: dict[int, tuple[list[int], list[int]]] = {}
        self._device = device

    def update(self, tables: dict[int, list[int]]) -> int:
        """Bring the rows of some slots up to date. tables: slot -> its block table. Returns how many entries were sent.

        A table that is the same list as last time has only grown, or changed within its last entries (see `engine/block_manager.py`).
        """
        places: list[int] = []
        blocks: list[int] = []
        width = self.values.shape[1]
        for slot, table in tables.items():
            assert len(table) <= width, f"a table of {len(table)} blocks, at most {width} fit"
            source, sent = self._known.get(slot, (None, []))
            same = max(0, min(len(sent), len(table)) - _TAIL) if source is table else 0
            if len(sent) == len(table) and source is table and sent[same:] == table[same:]:
                continue
            while same < min(len(sent), len(table)) and sent[same] == table[same]:
                same += 1
            places += range(slot * width + same, slot * width + len(table))
            blocks += table[same:]
            self._known[slot] = (table, sent[:same] + table[same:])
        if places:
            changes = torch.tensor([places, blocks], dtype=torch.int64, pin_memory=self._device.type == "cuda")
            changes = changes.to(self._device, non_blocking=True)
            self.values.view(-1).index_copy_(0, changes[0], changes[1].to(torch.int32))
        return len(places)
