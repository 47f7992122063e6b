"""A choice gets several tokens per step when drafts are kept; it must end where it would have ended with one."""

import tracemalloc

from engine.request import FinishReason, Output, TokenLogprob
from server.answers import usage_of
from server.choice import ENTRY_BYTES, Choice, EndRules
from server.output_parser import Delta, DeltaKind


class WordParser:
    """Shows nothing; stops behind token 9."""

    def __init__(self):
        self.seen, self.stopped_by, self.done, self.finish_reason = [], None, False, None

    def push(self, ids):
        self.seen += ids
        if 9 in self.seen:
            self.stopped_by = "nine"
        return []

    def finish(self, reason=None):
        self.finish_reason = "stop" if self.stopped_by or reason is FinishReason.STOP else "length"
        return []


def fed(outputs, **rules):
    choice = Choice(0, WordParser(), EndRules(1, **rules), token_bytes=lambda token: b"%d" % token)
    for output in outputs:
        choice.feed(output)
    return choice


def singles(output):
    last = len(output.token_ids) - 1
    for i, token in enumerate(output.token_ids):
        end = (output.finish_reason, output.stop_token_id) if i == last else (None, None)
        yield Output("r", [token], *end, output.logprobs[i : i + 1])


def outcome(choice):
    return choice.token_ids, choice.parser.seen, choice.finish_reason, choice.stop_reason, list(choice._entries)


def test_a_stop_string_inside_a_block_counts_nothing_behind_it():
    entries = (TokenLogprob(-0.5),) * 4
    block = Output("r", [7, 9, 8, 8], logprobs=entries)
    choice = fed([block])
    assert outcome(choice) == outcome(fed(singles(block)))
    assert choice.token_ids == [7, 9]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", "nine")
    assert choice.stopped_early


def test_a_stop_string_before_the_end_of_the_sequence_wins_and_needs_no_abort():
    block = Output("r", [9, 8, 1], FinishReason.STOP, stop_token_id=1)
    choice = fed([block])
    assert (choice.token_ids, choice.stop_reason, choice.stopped_early) == ([9], "nine", False)


def test_blocks_without_a_stop_are_taken_whole():
    block = Output("r", [7, 8, 1], FinishReason.STOP, stop_token_id=1)
    choice = fed([Output("r", [4, 5]), block])
    assert choice.token_ids == [4, 5, 7, 8, 1]
    assert (choice.finish_reason, choice.stop_reason, choice.stopped_early) == ("stop", None, False)


def test_usage_tells_what_speculation_did_only_when_it_did_something():
    plain = usage_of(10, 5, 0, 2)["completion_tokens_details"]
    assert plain == {"reasoning_tokens": 2}
    assert usage_of(10, 5, 0, 2, drafted=8, accepted=3)["completion_tokens_details"] == {
        "reasoning_tokens": 2,
        "accepted_prediction_tokens": 3,
        "rejected_prediction_tokens": 5,
    }


class LetterParser(WordParser):
    """Shows one letter a token, except of token 3, which has no text."""

    def push(self, ids):
        first, self.seen = len(self.seen), [*self.seen, *ids]
        return [Delta(DeltaKind.CONTENT, "x", tokens=(first + i,)) for i, token in enumerate(ids) if token != 3]


def held(*tokens, streamed):
    """Bytes held after each token, once its pieces were given out."""
    choice = Choice(0, LetterParser(), EndRules(1), token_bytes=lambda token: b"%d" % token, streamed=streamed)
    alternatives = TokenLogprob(-0.5, [(5000 + i, -1.5 - i) for i in range(20)])
    after = []
    for token in tokens:
        for piece in choice.feed(Output("r", [token], logprobs=(alternatives,))):
            assert len(choice.logprobs(piece)) == 1
        after.append(choice.held_bytes)
    return after


def test_a_stream_holds_the_log_probabilities_of_tokens_without_text_only():
    assert held(7, 8, streamed=True) == [0, 0]
    assert held(7, 3, 3, streamed=True) == [0, ENTRY_BYTES * 21, 2 * ENTRY_BYTES * 21]


def test_a_whole_answer_holds_all_of_them():
    assert held(7, 3, 8, streamed=False) == [ENTRY_BYTES * 21 * count for count in (1, 2, 3)]


def test_the_size_of_an_entry_is_about_what_it_takes():
    choice = Choice(0, LetterParser(), EndRules(1), token_bytes=lambda token: b"%d" % token)
    alternatives = TokenLogprob(-0.5, [(5000 + i, -1.5 - i * 0.37) for i in range(20)])
    tracemalloc.start()
    kept = [choice._entry(7, alternatives) for _ in range(300)]
    taken = tracemalloc.get_traced_memory()[0] / len(kept) / 21
    tracemalloc.stop()
    assert 0.7 * taken < ENTRY_BYTES < 1.4 * taken
