"""Matchers and masks against slow definitions, and whole engines whose constrained outputs must parse."""

from __future__ import annotations

import itertools
import json
import threading
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.engine import Engine
from engine.grammar_compiler import GrammarBuilds, GrammarCompiler, vocabulary_bytes
from engine.llm import LLM
from engine.models import tiny
from engine.request import FinishReason, Grammar, GrammarKind, Output, Request, SamplingParams, Sequence
from engine.structured_output import GrammarError, Matcher, apply_masks, num_words, pack_ids, row_masks, unpack
from engine.tokenizer import Tokenizer
from hicache.config import HiCacheConfig
from tests.engine.fake_runner import FakeLimits, FakeRunner
from tests.engine.test_engine import expected_greedy

EOS, THINK_END, DSML, VOCAB = 1, 8, 9, 4100  # four ids more than the tokenizer has
TEXT = GrammarKind.EBNF
OFF = HiCacheConfig(size_gb=0)


@lru_cache(maxsize=1)
def tokenizer() -> Tokenizer:
    return Tokenizer(json.loads(tiny.TOKENIZER_FILE.read_text(encoding="utf-8")), tiny.tokenizer_config())


@lru_cache(maxsize=1)
def compiler() -> GrammarCompiler:
    return GrammarCompiler(vocabulary_bytes(tokenizer(), VOCAB), [EOS])


def matcher_of(grammar: Grammar) -> Matcher:
    return Matcher(compiler().compile(grammar), grammar, [EOS], VOCAB)


def allowed(matcher: Matcher) -> set[int]:
    """The ids that the matcher's mask lets through."""
    mask = torch.full((num_words(VOCAB),), -1, dtype=torch.int32)
    matcher.fill(mask)
    return set(unpack(mask[None], VOCAB)[0].nonzero()[:, 0].tolist())


def language(words: list[str]) -> Grammar:
    """A grammar of exactly these words."""
    return Grammar(TEXT, "root ::= " + " | ".join(json.dumps(word, ensure_ascii=False) for word in words))


def oracle(words: list[str], output: list[int]) -> set[int]:
    """Ids that may follow `output`, by trying every id against every word."""
    if EOS in output:
        return {EOS}
    text = b"".join(map(tokenizer().token_bytes, output))
    ends = [word.encode()[len(text) :] for word in words if word.encode().startswith(text)]
    added = set(tokenizer().added.values())
    pieces = {i: tokenizer().token_bytes(i) for i in range(VOCAB) if i not in added}
    follow = {i for i, piece in pieces.items() if piece and any(end.startswith(piece) for end in ends)}
    return follow | ({EOS} if b"" in ends else set())


# ---- masks


WORDS = st.lists(st.text(st.sampled_from('ab"\\{ é部😀'), min_size=1, max_size=5), min_size=1, max_size=5, unique=True)


@settings(max_examples=25, deadline=None)
@given(words=WORDS, choices=st.lists(st.integers(0, 10**6), min_size=12, max_size=12))
def test_masks_are_exactly_what_an_exhaustive_search_allows_at_every_position(words: list[str], choices: list[int]) -> None:
    matcher, output = matcher_of(language(words)), []
    for choice in choices:
        expected = oracle(words, output)
        assert allowed(matcher) == expected, f"{words} behind {output}"
        output.append(sorted(expected)[choice % len(expected)])
        assert matcher.accept(output[-1])


@settings(max_examples=40, deadline=None)
@given(
    words=WORDS,
    trigger=st.lists(st.sampled_from([THINK_END, 300, 301]), max_size=4),
    moves=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 10**6)), max_size=40),
)
def test_rolling_back_across_trigger_and_end_is_as_if_the_tokens_had_never_come(
    words: list[str], trigger: list[int], moves: list[tuple[int, int]]
) -> None:
    grammar = Grammar(TEXT, language(words).text, tuple(trigger), (EOS, DSML) if trigger else ())
    matcher, output = matcher_of(grammar), []
    for kind, number in moves:
        if kind == 0 and output:
            count = number % (len(output) + 1)
            matcher.roll_back(count)
            output = output[: len(output) - count]
        elif kind == 1 and trigger and not matcher.started:
            output.append(trigger[number % len(trigger)])
            assert matcher.accept(output[-1])
        else:
            options = sorted(allowed(matcher))
            output.append(options[number % len(options)])
            assert matcher.accept(output[-1])
    fresh = matcher_of(grammar)
    fresh.follow(output)
    assert (fresh.num_tokens, fresh.started) == (matcher.num_tokens, matcher.started)
    assert allowed(fresh) == allowed(matcher)


@settings(max_examples=100, deadline=None)
@given(trigger=st.lists(st.integers(300, 302), min_size=1, max_size=5), free=st.lists(st.integers(300, 302), max_size=30))
def test_the_grammar_starts_behind_the_first_full_trigger(trigger: list[int], free: list[int]) -> None:
    matcher = matcher_of(Grammar(TEXT, 'root ::= "x"*', tuple(trigger)))
    for end in range(len(free) + 1):
        assert matcher.started == (free[end - len(trigger) : end] == trigger if end >= len(trigger) else False)
        if matcher.started:
            assert EOS in allowed(matcher)
            assert 300 not in allowed(matcher)
            return
        assert not end < len(free) or matcher.accept(free[end])


def test_reserved_ids_wait_for_the_trigger() -> None:
    matcher = matcher_of(Grammar(GrammarKind.REGEX, "ab?", (THINK_END,), (EOS, DSML)))
    assert allowed(matcher) == set(range(num_words(VOCAB) * 32)) & set(range(VOCAB)) - {EOS, DSML}
    assert not matcher.accept(EOS)
    assert matcher.num_tokens == 0
    assert matcher.accept(THINK_END)
    assert matcher.started
    assert DSML not in allowed(matcher)


def test_a_control_token_is_reached_by_its_id_only_and_never_by_its_spelling() -> None:
    spelled = tokenizer().encode_plain("<｜DSML｜ x>")
    by_id = matcher_of(Grammar(TEXT, f'root ::= "<" Token({DSML}) " x>"'))
    assert by_id.accept(spelled[0])
    assert allowed(by_id) == {DSML}
    anything = matcher_of(Grammar(TEXT, "root ::= [^]*"))
    assert not allowed(anything) & set(tokenizer().added.values()) - {EOS}
    anything.follow(spelled)


def test_drafts_get_masks_up_to_the_first_refused_one_and_the_matcher_stays() -> None:
    words = ["abba", "abc"]
    a, b = tokenizer().encode_plain("a")[0], tokenizer().encode_plain("b")[0]
    matcher = matcher_of(language(words))
    out = torch.zeros(5, num_words(VOCAB), dtype=torch.int32)
    assert matcher.fill_drafts([a, b, a, b], out) == 3
    for row, output in enumerate([[], [a], [a, b]]):
        assert set(unpack(out[row : row + 1], VOCAB)[0].nonzero()[:, 0].tolist()) == oracle(words, output)
    assert matcher.num_tokens == 0
    assert allowed(matcher) == oracle(words, [])


def test_behind_the_end_only_the_end_may_follow() -> None:
    matcher = matcher_of(language(["a"]))
    matcher.follow([tokenizer().encode_plain("a")[0], EOS, EOS])
    assert allowed(matcher) == {EOS}
    assert not matcher.accept(300)


def test_a_dead_end_is_an_error_and_not_a_free_row() -> None:
    with pytest.raises(GrammarError, match="allows no token"):
        allowed(matcher_of(Grammar(TEXT, "root ::= root")))


@settings(max_examples=50, deadline=None)
@given(ids=st.frozensets(st.integers(0, VOCAB - 1), max_size=40), listed=st.booleans())
def test_packed_ids_unpack_to_themselves(ids: frozenset[int], listed: bool) -> None:
    flags = unpack(pack_ids(VOCAB, ids, allowed=listed)[None], VOCAB)[0]
    assert set((flags if listed else ~flags).nonzero()[:, 0].tolist()) == ids


# ---- engines


def make_engine(*, drafts: int = 0, max_num_seqs: int = 4, num_blocks: int = 240, max_model_len: int = 400, **changes: Any) -> Engine:
    limits = FakeLimits(
        vocab_size=VOCAB,
        tokenizer_size=4096,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        draft_block_size=drafts,
    )
    runner = FakeRunner(limits, record=False, draft_noise=changes.pop("draft_noise", 0.0))
    engine = Engine(EngineConfig(num_draft_tokens=drafts, enable_mtp_varlen=False, **changes), OFF, runner=runner)
    engine.grammars = GrammarBuilds(compiler)
    return engine


_names = itertools.count()


def ask(engine: Engine, grammar: Grammar | None, prompt: list[int] | None = None, **params: Any) -> str:
    name = f"r{next(_names)}"
    sampling = SamplingParams(**{"temperature": 1.0, "max_tokens": 300, "seed": 1, **params})
    engine.add_request(Request(name, prompt or [3, 4, 5], sampling, grammar=grammar))
    return name


def run(engine: Engine, limit: int = 5000) -> dict[str, list[Output]]:
    outputs: dict[str, list[Output]] = {}
    for _ in range(limit):
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        if engine.idle:
            return outputs
    raise AssertionError("the engine does not come to rest")


def ids(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def text_of(outputs: list[Output]) -> str:
    return tokenizer().decode([token for token in ids(outputs) if token != EOS])


LEAVES = st.sampled_from(
    [
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer", "minimum": -5, "maximum": 120},
        {"enum": ["red", "grün😀", 7, None]},
        {"const": "fixed"},
        {"type": "string", "maxLength": 4},
        {"type": "string", "pattern": "^[a-c]{1,3}$"},
    ]
)


def objects(values: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    names = st.lists(st.sampled_from(["a", "b", "naïve", "c d"]), min_size=1, max_size=3, unique=True)
    return names.flatmap(
        lambda keys: st.tuples(*(values for _ in keys)).map(
            lambda found: {
                "type": "object",
                "properties": dict(zip(keys, found, strict=True)),
                "required": keys[:2],
                "additionalProperties": False,
            }
        )
    )


def arrays(values: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return values.map(lambda item: {"type": "array", "items": item, "maxItems": 2})


SCHEMAS = st.recursive(LEAVES, lambda inner: objects(inner) | arrays(inner), max_leaves=4)


def conforms(value: Any, schema: dict[str, Any]) -> bool:
    """A validator for the schemas above, independent of the grammar."""
    if "enum" in schema or "const" in schema:
        return value in schema.get("enum", [schema.get("const")])
    match schema["type"]:
        case "object":
            return (
                isinstance(value, dict)
                and set(schema["required"]) <= value.keys() <= schema["properties"].keys()
                and all(conforms(value[key], schema["properties"][key]) for key in value)
            )
        case "array":
            return isinstance(value, list) and len(value) <= 2 and all(conforms(item, schema["items"]) for item in value)
        case "string" if "pattern" in schema:
            return isinstance(value, str) and 1 <= len(value) <= 3 and set(value) <= set("abc")
        case "string":
            # Bytes that are no UTF-8, which the library lets through, decode to several replacement characters.
            return isinstance(value, str) and len(value.replace("\ufffd", "")) <= 4
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool) and -5 <= value <= 120
        case "boolean":
            return isinstance(value, bool)
    return value is None


@pytest.mark.parametrize("drafts", [0, 3])
@settings(max_examples=8, deadline=None)
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_constrained_output_always_conforms_sampled_and_greedy(drafts: int, schema: dict[str, Any], seed: int) -> None:
    engine = make_engine(drafts=drafts, draft_noise=0.3, num_blocks=2000, max_model_len=2000)
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    prompt = [3 + seed % 200, 4, 5]
    kinds = [{"seed": seed}, {"seed": None}, {"temperature": 0.0}]
    names = [ask(engine, grammar, prompt, max_tokens=1900, **params) for params in kinds]
    outputs = run(engine)
    for name in names:
        last = outputs[name][-1]
        assert last.finish_reason is FinishReason.STOP, f"{last.finish_reason} {last.error}: {text_of(outputs[name])!r}"
        assert conforms(json.loads(text_of(outputs[name])), schema), text_of(outputs[name])


def test_drafts_do_not_change_constrained_output() -> None:
    grammar = Grammar(
        GrammarKind.JSON_SCHEMA, '{"type": "array", "items": {"enum": ["x", 10, true]}, "minItems": 6, "maxItems": 9}', (300,), (EOS,)
    )
    texts = []
    for drafts, overlap in ((0, False), (1, False), (4, False), (0, True), (4, True)):
        engine = make_engine(drafts=drafts, draft_noise=0.1, zero_overhead_scheduling=overlap)
        names = [ask(engine, grammar, temperature=t, logit_bias={300: 5.0}, seed=7) for t in (0.0, 1.0)]
        outputs = run(engine)
        texts.append([ids(outputs[name]) for name in names])
        assert not drafts or sum(o.accepted for name in names for o in outputs[name]) > 0
        engine.close()
    assert all(one == texts[0] for one in texts)


@pytest.mark.parametrize("drafts", [0, 3])
def test_free_rows_are_bit_unchanged_by_constrained_neighbours(drafts: int) -> None:
    schema = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "array", "items": {"type": "boolean"}, "minItems": 5, "maxItems": 5}')
    free = [{"temperature": 0.0}, {"seed": 5}, {"seed": 6, "top_p": 0.9, "logprobs": True, "top_logprobs": 2}]

    def outputs_with(neighbours: int) -> list[tuple[list[int], list[Any]]]:
        engine = make_engine(drafts=drafts, max_num_seqs=8)
        names = [ask(engine, None, [7 + i, 9], max_tokens=24, **params) for i, params in enumerate(free)]
        for i in range(neighbours):
            ask(engine, schema, [20 + i], temperature=float(i % 2))
        outputs = run(engine)
        return [(ids(outputs[n]), [entry for o in outputs[n] for entry in o.logprobs]) for n in names]

    alone, mixed = outputs_with(0), outputs_with(4)
    assert alone == mixed
    assert alone[0][0] == expected_greedy([7, 9], 24, make_engine().limits)


def test_preempted_constrained_sequences_continue_where_they_were() -> None:
    grammar = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "array", "items": {"enum": [12345]}, "minItems": 4, "maxItems": 4}')
    roomy, tight = make_engine(num_blocks=240), make_engine(num_blocks=24, max_model_len=80)
    texts = []
    for engine in (roomy, tight):
        names = [ask(engine, grammar, [30 + i, 5, 6], seed=i, max_tokens=70) for i in range(4)]
        outputs = run(engine)
        texts.append([ids(outputs[name]) for name in names])
    assert tight.stats()["preemptions_total"] > 0
    assert roomy.stats()["preemptions_total"] == 0
    assert texts[0] == texts[1]


@pytest.mark.parametrize(("kind", "text"), [(GrammarKind.REGEX, "("), (TEXT, "root ::= x"), (GrammarKind.JSON_SCHEMA, "{")])
def test_an_invalid_grammar_ends_its_request_only(kind: GrammarKind, text: str) -> None:
    engine = make_engine()
    bad, good = ask(engine, Grammar(kind, text)), ask(engine, None, max_tokens=4, ignore_eos=True)
    outputs = run(engine)
    assert outputs[bad][-1].finish_reason is FinishReason.ERROR
    assert "cannot be compiled" in outputs[bad][-1].error
    assert len(ids(outputs[good])) == 4


def test_offline_generation_takes_a_grammar() -> None:
    with LLM(engine=make_engine(), tokenizer=tokenizer()) as llm:
        results = llm.generate(["x", "y"], SamplingParams(max_tokens=30, seed=1), grammar=language(["ab", "ba"]))
    assert [result.finish_reason for result in results] == [FinishReason.STOP] * 2
    assert {result.text for result in results} <= {"ab", "ba"}


def test_a_dead_end_during_generation_ends_its_request_only() -> None:
    engine = make_engine()
    bad, good = ask(engine, Grammar(TEXT, 'root ::= "a" x\nx ::= x')), ask(engine, None, max_tokens=4, ignore_eos=True)
    outputs = run(engine)
    assert outputs[bad][-1].finish_reason is FinishReason.ERROR
    assert "allows no token" in outputs[bad][-1].error
    assert len(ids(outputs[good])) == 4


def test_steps_go_on_while_a_grammar_is_compiled_and_an_abort_reaches_it() -> None:
    release, engine = threading.Event(), make_engine()

    def slow_compiler() -> GrammarCompiler:
        release.wait(20)
        return compiler()

    engine.grammars = GrammarBuilds(slow_compiler)
    try:
        waiting, aborted = ask(engine, language(["ab"])), ask(engine, language(["ab"]))
        free = ask(engine, None, max_tokens=5, ignore_eos=True)
        outputs: list[Output] = []
        for _ in range(12):
            outputs += engine.step()
            assert not engine.idle
        assert engine.stats()["waiting"] == 2
        assert {o.request_id for o in outputs} == {free}
        assert outputs[-1].finish_reason is FinishReason.LENGTH
        engine.abort(aborted)
        assert [(o.request_id, o.finish_reason) for o in engine.step()] == [(aborted, FinishReason.ABORT)]
    finally:
        release.set()
    assert text_of(run(engine, 20000)[waiting]) == "ab"


def test_a_build_that_takes_too_long_is_given_up() -> None:
    now, release = [0.0], threading.Event()
    builds = GrammarBuilds(lambda: (release.wait(20), compiler())[1], lambda: now[0])
    try:
        builds.submit(Request("slow", [1], SamplingParams(), grammar=language(["a"])))
        assert builds.poll() == []
        assert len(builds) == 1
        now[0] = 21.0
        (build,) = builds.poll()
        assert "within 20 s" in build.error
        assert len(builds) == 0
    finally:
        release.set()
        builds.close()


def test_an_output_ends_with_its_grammar_in_spite_of_min_tokens_and_ignore_eos() -> None:
    engine = make_engine()
    early = ask(engine, language(["ab"]), min_tokens=20)
    forced = ask(engine, language(["ab"]), ignore_eos=True, max_tokens=8)
    outputs = run(engine)
    assert text_of(outputs[early]) == "ab"
    assert outputs[early][-1].finish_reason is FinishReason.STOP
    assert text_of(outputs[forced]) == "ab"
    assert len(ids(outputs[forced])) == 8


def test_the_compiler_forgets_grammars_beyond_its_limit() -> None:
    small = GrammarCompiler(vocabulary_bytes(tokenizer(), VOCAB), [EOS], cache_limit_bytes=2**20)
    for i in range(30):
        small.compile(
            Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "object", "properties": {f"k{i}": {"type": "string", "maxLength": 300}}}))
        )
    assert 0 < small.cache_bytes <= 2**21


def test_logits_without_masks_keep_every_bit() -> None:
    logits = torch.randn(3, VOCAB)
    before = logits.clone()
    plain = Request("r", [3, 4], SamplingParams())
    rows = [Sequence(i, plain, 0.0, 0, [3, 4], 2, 2) for i in range(3)]
    rows[1].matcher = matcher_of(language(["ab"]))
    masks = row_masks(rows, VOCAB)
    assert masks is not None
    assert masks.rows == [1]
    apply_masks(logits, masks)
    assert torch.equal(logits[::2], before[::2])
    kept = logits[1] > float("-inf")
    assert torch.equal(logits[1][kept], before[1][kept])
    assert set(kept.nonzero()[:, 0].tolist()) == oracle(["ab"], [])
