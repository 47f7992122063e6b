"""What the generator promises: determinism, supervision of exactly what an assistant writes, packing that a kernel tile can rely on."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from recipes.tiny import corpus, heldout, packing, words
from recipes.tiny.words import Source

SEEDS = range(6)


def family_sample(family: str, seed: int) -> corpus.Sample:
    return corpus.sample_from(corpus.FAMILIES[family](Source(f"test/{family}/{seed}"), 900))


def test_equal_seeds_give_equal_samples() -> None:
    one, two = (corpus.draw_sample("a/0/1", "short", 60, 512) for _ in range(2))
    assert np.array_equal(one.ids, two.ids)
    assert not np.array_equal(one.ids, corpus.draw_sample("a/0/2", "short", 60, 512).ids)


@pytest.mark.parametrize("family", [name for name in corpus.FAMILIES if name != "text"])
def test_supervised_text_is_what_the_assistant_wrote(family: str) -> None:
    for seed in SEEDS:
        c = corpus.FAMILIES[family](Source(f"test/{family}/{seed}"), 900)
        sample = corpus.sample_from(c)
        written = corpus.tokenizer().decode(sample.ids[sample.weights == 1.0].tolist(), skip_special_tokens=False)
        answers = [m["content"] for m in c.messages if m["role"] == "assistant"]
        assert written.count("<｜end▁of▁sentence｜>") == len(answers)
        assert all(answer in written for answer in answers)
        assert "<｜User｜>" not in written
        assert "<｜Assistant｜>" not in written


def test_no_sample_is_longer_than_asked() -> None:
    lengths = [len(s.ids) for s in itertools.islice(corpus.samples(3, 0, "short", 60, 400), 60)]
    assert max(lengths) <= 400
    assert max(lengths) > 200


def test_held_out_list_words_are_another_half() -> None:
    for kind in ("names", "cities", "colors", "things", "jobs"):
        train, held = words._split(kind, False), words._split(kind, True)
        assert train
        assert held
        assert not set(train) & set(held)


def test_held_out_sums_never_occur_in_training() -> None:
    def sums(held_out: bool) -> set[str]:
        found = set()
        for seed in range(60):
            c = corpus.FAMILIES["addition"](Source(f"sum/{seed}", held_out), 300)
            found |= {m["content"].split(" =")[0] for m in c.messages if m["role"] == "assistant"}
        return found

    assert not sums(True) & sums(False)


@pytest.mark.parametrize("truncated", [0.0, 1.0])
def test_packed_documents_start_on_tiles_and_keep_to_themselves(truncated: float) -> None:
    stream = corpus.samples(5, 0, "short", 60, 500)
    packed = next(packing.batches(stream, 4096, truncated, random.Random(0)))
    assert (packed.start % packing.ALIGN == 0).all()
    assert (packed.end % packing.ALIGN == 0).all()
    rows = np.arange(4096)
    assert ((packed.start <= rows) & (rows < packed.end) & (packed.start <= packed.rect)).all()
    assert (packed.end - packed.start).max() <= 512
    firsts = np.unique(packed.start[1:][packed.weights[1:] > 0])
    assert (packed.weights[firsts[firsts > 0] - 1] == 0).all(), "the row before a document must not predict its first token"
    assert (packed.weights[packed.kl_rows] == 1.0).mean() > 0.9
    if truncated:
        cut = packed.rect > packed.start
        assert cut.any()
        assert (packed.weights[cut & (rows < packed.rect)] == 0).all()


def test_a_batch_survives_its_byte_form() -> None:
    packed = packing.pack([family_sample("json", 0)], 1024, 0.0, random.Random(0))
    back = packing.from_bytes(packed.to_bytes(), 1024)
    for name, _ in packing.LAYOUT:
        assert np.array_equal(getattr(packed, name), getattr(back, name))


@pytest.mark.parametrize("name", ["recall_500", "tool_call", "tool_none", "json", "addition_thinking"])
def test_a_held_out_example_ends_with_its_answer(name: str) -> None:
    e = heldout.example(name, 0)
    assert e.ids[-1] == corpus.EOS
    assert e.ids[e.answer - 2] == corpus.ASSISTANT
    assert corpus.supervised(e.ids)[e.answer :].all()
    assert not corpus.supervised(e.ids)[e.answer - 1]
