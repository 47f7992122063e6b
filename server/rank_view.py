"""What the front knows of one rank, and whether the rank may take one more request."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.request import Request
from server import protocol
from server.tickets import Ticket
from server.totals import Record, empty_record

# Of prompts that wait for one rank, 40 bytes each here and 50 there: more than any rank prefills until `server.queue_timeout_s` is over.
MAX_QUEUED_TOKENS = 32 * 2**20


@dataclass(slots=True)
class RankView:
    """What the front knows of one rank of the present incarnation. `retired` sums the counters of earlier incarnations.

    report_unix_s: when `stats` arrived, 0 before the first.
    """

    rank: int
    pid: int = 0
    limits: protocol.RankLimits | None = None
    stats: Record = field(default_factory=empty_record)
    report_unix_s: float = 0.0
    retired: Record = field(default_factory=empty_record)
    tickets: dict[str, Ticket] = field(default_factory=dict)

    @property
    def queued_tokens(self) -> int:
        return sum(ticket.queued_tokens for ticket in self.tickets.values() if ticket.queued)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens that the rank keeps for later, whatever it will find of them in its cache; every choice has its own."""
        return sum(ticket.prompt_len * len(ticket.open_choices) for ticket in self.tickets.values() if ticket.queued)

    @property
    def sequences(self) -> int:
        return sum(len(ticket.open_choices) for ticket in self.tickets.values())

    def has_room(self, requests: list[Request], max_queue: int) -> bool:
        """Whether the rank may take the choices of one prompt. max_queue: setting `server.max_queue`."""
        assert self.limits is not None, "asked before the rank was ready"
        active = self.limits.max_num_seqs
        if self.sequences + len(requests) > active + (max_queue or 4 * active):
            return False
        waiting, more = self.waiting_tokens, len(requests[0].prompt_token_ids) * len(requests)
        return not waiting or waiting + more <= MAX_QUEUED_TOKENS
