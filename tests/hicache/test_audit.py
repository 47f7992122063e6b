"""Checksums of host and device notice any changed byte."""

from __future__ import annotations

import pytest
import torch

from hicache.audit import ALWAYS_VERIFIED, Audit, DeviceAudit, HostAudit, NoAudit, flip_bytes, open_audit
from hicache.host_pool import HostArena


@pytest.mark.parametrize("audit", [HostAudit(8, full=True), DeviceAudit(8, 96, torch.device("cpu"), full=True)], ids=["host", "device"])
def test_any_single_flipped_byte_is_found_at_its_row(audit: Audit) -> None:
    rows = torch.randint(0, 256, (4, 96), dtype=torch.uint8)
    audit.store(rows, [0, 1, 2], [7, 3, 5])
    assert audit.choose(3) == [0, 1, 2]
    assert audit.first_bad([7, 3, 5], rows, [0, 1, 2]) is None
    assert audit.first_bad([], rows, []) is None
    for byte in range(96):
        rows[2, byte] ^= 0x40
        assert audit.first_bad([7, 3, 5], rows, [0, 1, 2]) == 2
        rows[2, byte] ^= 0x40


def test_sampled_host_audit_always_looks_at_the_last_pages() -> None:
    audit = HostAudit(8, full=False)
    assert audit.choose(2) == [0, 1]
    chosen = [audit.choose(1000) for _ in range(20)]
    assert all(c is not None and c[-ALWAYS_VERIFIED:] == list(range(1000 - ALWAYS_VERIFIED, 1000)) for c in chosen)
    others = sum(len(c or []) - ALWAYS_VERIFIED for c in chosen)
    assert 100 < others < 350


def test_mode_decides_the_audit() -> None:
    cpu = torch.device("cpu")
    assert isinstance(open_audit("off", 1, 4096, cpu), NoAudit)
    assert isinstance(open_audit("full", 1, 4096, cpu), HostAudit)
    assert NoAudit().choose(5) is None


def test_flip_reports_what_it_changed() -> None:
    arena = HostArena(2, 4096)
    arena.rows[1, 3] = 0x3F
    flips = flip_bytes(arena, 1, [3, 7])
    assert [(f.offset, f.before, f.after) for f in flips] == [(3, 0x3F, 0x7F), (7, 0, 0x40)]
    assert arena.rows[1, 3] == 0x7F
