import json
from importlib.resources import files

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError, RequestError
from engine.llm import LLM
from engine.request import FinishReason, SamplingParams
from engine.tokenizer import Tokenizer
from hicache.config import HiCacheConfig
from tests.engine.fake_runner import FakeLimits, FakeRunner, expected_greedy

GREEDY = SamplingParams(temperature=0, max_tokens=12)
ENDLESS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(json.loads(files("engine.models").joinpath("tiny_tokenizer.json").read_text()))


@pytest.fixture
def llm(tokenizer) -> LLM:
    limits = FakeLimits(vocab_size=len(tokenizer), max_model_len=200, num_blocks=100)
    return LLM(engine=Engine(EngineConfig(), HiCacheConfig(size_gb=0), runner=FakeRunner(limits)), tokenizer=tokenizer)


def test_results_come_in_the_order_of_the_prompts(llm):
    prompts = [[5 + i] * (1 + 3 * i % 7) for i in range(9)]
    results = llm.generate(params=ENDLESS, prompt_token_ids=prompts)
    expected = [
        expected_greedy(ids, 12, FakeLimits(vocab_size=llm.engine.limits.vocab_size, max_model_len=200, eos_token_id=-1)) for ids in prompts
    ]
    assert [result.token_ids for result in results] == expected
    assert [result.text for result in results] == [llm.tokenizer.decode(ids) for ids in expected]
    assert {result.finish_reason for result in results} == {FinishReason.LENGTH}


def test_parameters_may_differ_per_prompt(llm):
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 4, 2)]
    results = llm.generate(["one", "two", "three"], params)
    assert [len(result.token_ids) for result in results] == [1, 4, 2]


def test_a_single_text_is_a_prompt_too(llm):
    assert len(llm.generate("one text", ENDLESS)) == 1
    assert llm.generate([], ENDLESS) == []


def test_a_stop_string_cuts_the_text_and_ends_the_sequence(llm):
    [free] = llm.generate(["hello"], ENDLESS)
    middle = len(free.text) // 2
    stop = free.text[middle : middle + 3]
    [cut] = llm.generate(["hello"], ENDLESS, stop=[stop])
    assert cut.text == free.text[: free.text.index(stop)]
    assert cut.finish_reason is FinishReason.STOP
    assert free.token_ids[: len(cut.token_ids)] == cut.token_ids
    assert not llm.engine.scheduler.has_work
    assert llm.engine.stats()["kv"]["tokens_used"] == 0


def test_streamed_text_is_the_text(llm):
    pieces: dict[int, str] = {}
    progress = []
    results = llm.generate(
        ["a", "b", "c"],
        ENDLESS,
        stop="zzzz",
        on_text=lambda index, text: pieces.update({index: pieces.get(index, "") + text}),
        on_progress=progress.append,
    )
    assert [pieces[i] for i in range(3)] == [result.text for result in results]
    assert (progress[-1].finished, progress[-1].total, progress[-1].generated_tokens) == (3, 3, 36)


def test_the_id_that_ends_a_sequence_has_no_text(llm):
    [free] = llm.generate(["hello"], ENDLESS)
    last = free.token_ids[5]
    [cut] = llm.generate(["hello"], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=(last,)))
    end = free.token_ids.index(last)
    assert cut.token_ids == free.token_ids[: end + 1]
    assert cut.text == llm.tokenizer.decode(free.token_ids[:end])


def test_without_detokenizing_no_tokenizer_is_needed():
    engine = Engine(EngineConfig(), HiCacheConfig(size_gb=0), runner=FakeRunner())
    with LLM(engine=engine) as llm:
        [result] = llm.generate(params=GREEDY, prompt_token_ids=[[3, 4]], detokenize=False)
        assert result.token_ids == expected_greedy([3, 4], 12, engine.limits)
        assert result.text == ""
        with pytest.raises(RequestError, match="stop strings"):
            llm.generate(params=GREEDY, prompt_token_ids=[[3]], detokenize=False, stop="x")


def test_a_bad_prompt_is_named_and_nothing_runs(llm):
    with pytest.raises(RequestError, match="prompt 1: token id 999999"):
        llm.generate(params=GREEDY, prompt_token_ids=[[3], [999_999]])
    with pytest.raises(RequestError, match="prompt 0: the prompt has no tokens"):
        llm.generate(params=GREEDY, prompt_token_ids=[[]])
    with pytest.raises(RequestError, match="2 sampling parameters for 1 prompts"):
        llm.generate(["a"], [GREEDY, GREEDY])
    with pytest.raises(RequestError, match="either prompts or"):
        llm.generate()
    assert not llm.engine.scheduler.has_work


def test_an_interrupted_call_leaves_no_request_behind(llm):
    def interrupt(progress):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], ENDLESS, on_progress=interrupt)
    assert not llm.engine.scheduler.has_work
    assert len(llm.generate(["c"], ENDLESS)[0].token_ids) == 12


def test_a_failed_request_reports_its_error(llm):
    llm.engine.inject_fault("nan")
    bad, good = llm.generate(["a", "b"], ENDLESS)
    assert (bad.finish_reason, good.finish_reason) == (FinishReason.ERROR, FinishReason.LENGTH)
    assert "invalid logits" in bad.error


def test_unknown_settings_and_several_ranks_are_refused():
    with pytest.raises(ConfigError, match="max_num_sequences"):
        LLM("somewhere", max_num_sequences=3)
    with pytest.raises(ConfigError, match=r"engine\.dp is 2"):
        LLM("somewhere", dp=2)
