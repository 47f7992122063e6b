"""A tensor group between threads of this process, for tests that need many ranks and no processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

from engine.parallel.tensor_group import Piece

# Ends tests in which a rank makes no call of a collective. Ranks are threads that share a core with whatever else the machine runs, and one
# may be building the compiled step meanwhile.
MEETING_S = 280


class ThreadTensors:
    """One rank's end. `board` holds what every rank gave; two meetings fence it."""

    def __init__(self, rank: int, size: int, meeting: threading.Barrier, board: list[Any]) -> None:
        self.rank, self.size = rank, size
        self._meeting, self._board = meeting, board
        self.bytes_sent = 0

    def max(self, values: list[int]) -> list[int]:
        return self._share(values, lambda board: [max(column) for column in zip(*board, strict=True)])

    def gather_ints(self, mine: list[int]) -> list[list[int]]:
        return self._share(mine, lambda board: [list(given) for given in board])

    def all_gather(self, out: Tensor, mine: Tensor) -> None:
        self.bytes_sent += mine.nbytes
        self._share(mine, lambda board: [out.view(self.size, *mine.shape)[i].copy_(given) for i, given in enumerate(board)])

    def all_to_all(self, out: Tensor, mine: Tensor) -> None:
        self.bytes_sent += mine.nbytes
        self._share(mine, lambda board: [out[i].copy_(given[self.rank]) for i, given in enumerate(board)])

    def all_reduce(self, tensor: Tensor) -> None:
        tensor.copy_(self._share(tensor.clone(), lambda board: sum(board[1:], board[0].clone())))

    def broadcast(self, tensor: Tensor, source: int) -> None:
        self._share(tensor if self.rank == source else None, lambda board: tensor.copy_(board[source]))

    def swap(self, sends: list[Piece], receives: list[Piece]) -> None:
        def take(board: list[list[Piece]]) -> None:
            queues = [[piece for piece, peer in given if peer == self.rank] for given in board]
            for target, peer in receives:
                target.copy_(queues[peer].pop(0))
            assert not any(queues), "a rank sent what nobody received"

        self._share(sends, take)

    def _share(self, given: Any, use: Callable[[list[Any]], Any]) -> Any:
        self._board[self.rank] = given
        self._meeting.wait(timeout=MEETING_S)
        result = use(self._board)
        self._meeting.wait(timeout=MEETING_S)
        return result
