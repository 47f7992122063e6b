"""Whether steps draft: the better way, left only once it has lost something, and at times the other way at a bounded price."""

from __future__ import annotations

# A way that is taken up is kept for so many steps: the first one finds other things in the caches or fills the draft windows, the others
# show what this way costs (`ENOUGH` in spec_costs.py).
TRIAL = 4
# Share of the time that trials of the other way may lose. One that changes nothing halves it for the next ones.
TRIAL_SHARE = 0.01
LEAST_TRIAL_SHARE = TRIAL_SHARE / 8
MAX_REST = 32  # plain steps between two questions: to weigh all drafts costs a few per cent of a step
TURN = 1.0  # what a turn costs, in plain steps


class Mode:
    """What steps of about the same number of sequences do at present. Both ways are tried: only steps that are taken say what they cost."""

    def __init__(self) -> None:
        self.drafts: bool | None = None  # None: not asked yet
        self.on_trial = False
        self.budget = 0  # drafts of a step that drafts, as long as nothing is asked
        self._left = 0  # steps before the next question
        self._rest = TRIAL  # length of the next pause
        self._spent_s = 0.0  # in steps of this way since the other one was taken
        self._lost_s = 0.0  # in the last of them against the other one; a gain makes up for earlier losses only
        self._share = TRIAL_SHARE

    def holds(self) -> bool:
        """Whether the next step does what the last one did, without a question. Counts it."""
        if self._left == 0:
            return False
        self._left -= 1
        return True

    def decide(self, plain: tuple[float, float], drafted: tuple[float, float]) -> None:
        """Choose by expected tokens and seconds of a step of either way.

        What is expected of one step may not be typical: a way is left when it has lost as much as the turn costs, and a trial ends
        where it began, whatever it has shown.
        """
        if self.drafts is None:
            self.drafts = drafted[0] * plain[1] > plain[0] * drafted[1]
        elif self.on_trial:
            self.on_trial, self._share = False, max(self._share / 2, LEAST_TRIAL_SHARE)
            self._turn()
        (tokens, seconds), (other_tokens, other_s) = (drafted, plain) if self.drafts else (plain, drafted)
        steps = 1 if self.drafts else self._rest
        self._spent_s += steps * seconds
        self._lost_s = max(0.0, self._lost_s + steps * (seconds - tokens * other_s / other_tokens))
        turn_s = TURN * plain[1]
        trial_s = TRIAL * max(0.0, other_s - other_tokens * seconds / tokens) + 2 * turn_s
        if self._lost_s > turn_s:
            self._turn()
            self._share = TRIAL_SHARE
        elif trial_s < self._share * self._spent_s:
            self._turn()
            self._left, self.on_trial = TRIAL - 1, True
            return
        if not self.drafts:
            self._left, self._rest = self._rest - 1, min(2 * self._rest, MAX_REST)

    def _turn(self) -> None:
        self.drafts, self._spent_s, self._lost_s, self._rest = not self.drafts, 0.0, 0.0, TRIAL
