"""Offline generation in this process: prompts in, texts out, in the order in which they were asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError, RequestError
from engine.request import FinishReason, Grammar, Output, Request, SamplingParams, TokenLogprob
from engine.stop_strings import StopStrings
from engine.tokenizer import IncrementalDetokenizer, Tokenizer
from hicache.config import HiCacheConfig


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """One prompt's answer. `text` ends before a stop string; `token_ids` ends with the token that ended the sequence.

    error: why a request failed while it ran (`finish_reason` ERROR), empty otherwise.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    cached_tokens: int
    logprobs: list[TokenLogprob] = field(default_factory=list)
    error: str = ""


@dataclass(frozen=True, slots=True)
class GenerationProgress:
    """How far a call of `generate` is."""

    finished: int
    total: int
    generated_tokens: int


class LLM:
    """A model in this process, one rank. Use it as a context manager, or call `close`.

    model: directory of the checkpoint. hicache: settings of the host prefix cache, off when None. settings: fields of `EngineConfig`.
    engine, tokenizer: ready-made ones, then nothing is loaded.

    Raises:
        ConfigError, CheckpointError, NotEnoughMemory: with the remedy in the message.
    """

    def __init__(
        self,
        model: str = "",
        *,
        hicache: HiCacheConfig | None = None,
        engine: Engine | None = None,
        tokenizer: Tokenizer | None = None,
        on_progress: Callable[[str, float], None] | None = None,
        **settings: Any,
    ) -> None:
        if engine is None:
            config = _config(model, settings)
            engine = Engine(config, hicache or HiCacheConfig(size_gb=0), on_progress=on_progress)
        self.engine = engine
        self._model = model
        self._tokenizer = tokenizer
        self._calls = 0

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer, loaded at its first use: prompts of ids alone need none, their texts do."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.from_dir(self._model)
        return self._tokenizer

    def generate(
        self,
        prompts: str | Sequence[str] | None = None,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prompt_token_ids: Sequence[Sequence[int]] | None = None,
        stop: str | Sequence[str] = (),
        detokenize: bool = True,
        grammar: Grammar | None = None,
        on_progress: Callable[[GenerationProgress], None] | None = None,
        on_text: Callable[[int, str], None] | None = None,
    ) -> list[GenerationResult]:
        """Run prompts, given as texts or as token ids, to their ends. One `params` for all or one per prompt.

        stop: strings that end every text. grammar: what every text must match. detokenize False leaves `text` empty and needs no tokenizer.
        on_text: called with (index, new text) as it is produced, never with a part that a stop string may still cut.

        Raises:
            RequestError: a prompt cannot be served, named by its index; then nothing has run.
        """
        token_ids = self._token_ids(prompts, prompt_token_ids)
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if stops and not detokenize:
            raise RequestError("stop strings need the text", hint="leave detokenize on, or use stop_token_ids")
        requests = self._requests(token_ids, _per_prompt(params, len(token_ids)), grammar)
        jobs = {request.request_id: _Job(index, self._text_end(stops, detokenize)) for index, request in enumerate(requests)}
        try:
            for request in requests:
                self.engine.add_request(request)
            self._run(jobs, on_progress, on_text)
        finally:
            # An interrupt or an error must not leave requests behind that the next call would compute.
            for request_id, job in jobs.items():
                if job.reason is None:
                    self.engine.abort(request_id)
        return [job.result() for job in jobs.values()]

    def _run(
        self,
        jobs: dict[str, _Job],
        on_progress: Callable[[GenerationProgress], None] | None,
        on_text: Callable[[int, str], None] | None,
    ) -> None:
        finished = generated = 0
        while finished < len(jobs):
            outputs = self.engine.step()
            assert outputs or not self.engine.idle, f"{len(jobs) - finished} requests are open but the engine is idle"
            for output in outputs:
                job = jobs.get(output.request_id)
                if job is None or job.reason is not None:
                    continue  # the ABORT that answers a stop string, of this call or of an interrupted one
                generated += len(output.token_ids)
                piece = job.take(output)
                if piece and on_text is not None:
                    on_text(job.index, piece)
                if job.reason is not None:
                    finished += 1
                    if output.finish_reason is None:
                        self.engine.abort(output.request_id)
            if on_progress is not None:
                on_progress(GenerationProgress(finished, len(jobs), generated))

    def _token_ids(self, prompts: str | Sequence[str] | None, prompt_token_ids: Sequence[Sequence[int]] | None) -> list[list[int]]:
        if (prompts is None) == (prompt_token_ids is None):
            raise RequestError(
                "give either prompts or prompt_token_ids", hint='generate(["a text"]) or generate(prompt_token_ids=[[1, 2]])'
            )
        if prompt_token_ids is not None:
            return [list(ids) for ids in prompt_token_ids]
        texts = [prompts] if isinstance(prompts, str) else list(prompts or ())
        return [self.tokenizer.encode(text, add_special=True) for text in texts]

    def _requests(self, token_ids: list[list[int]], params: list[SamplingParams], grammar: Grammar | None) -> list[Request]:
        self._calls += 1
        requests = []
        for index, (ids, one) in enumerate(zip(token_ids, params, strict=True)):
            request = Request(f"generate-{self._calls}-{index}", ids, one, grammar=grammar)
            try:
                self.engine.check_request(request)
            except RequestError as error:
                raise RequestError(f"prompt {index}: {error}", hint=error.hint) from error
            requests.append(request)
        return requests

    def _text_end(self, stops: tuple[str, ...], detokenize: bool) -> _TextEnd | None:
        return _TextEnd(IncrementalDetokenizer(self.tokenizer), StopStrings(stops)) if detokenize else None

    def close(self) -> None:
        """Release the model. Calling it twice is harmless."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class _TextEnd:
    """Where a sequence's text comes from and what cuts it."""

    detokenizer: IncrementalDetokenizer
    stops: StopStrings


class _Job:
    """What has been produced for one prompt."""

    def __init__(self, index: int, text_end: _TextEnd | None) -> None:
        self.index = index
        self.reason: FinishReason | None = None
        self._text_end = text_end
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._cached_tokens = 0
        self._error = ""

    def take(self, output: Output) -> str:
        """Add a step's tokens. Returns the text that is now certain; sets `reason` when the sequence has ended."""
        self._cached_tokens = self._cached_tokens if output.cached_tokens is None else output.cached_tokens
        self._logprobs += output.logprobs
        self._error = output.error
        self.reason = output.finish_reason
        if self._text_end is None:
            self._token_ids += output.token_ids
            return ""
        piece = self._take_text(output, self._text_end)
        self._text.append(piece)
        return piece

    def _take_text(self, output: Output, end: _TextEnd) -> str:
        piece = ""
        for token in output.token_ids:
            self._token_ids.append(token)
            if token == output.stop_token_id:
                continue  # the id that ends a sequence has no text of its own
            piece += end.stops.push(end.detokenizer.push([token]))
            if end.stops.matched is not None:
                self.reason = FinishReason.STOP
                return piece
        if output.finish_reason is not None:
            piece += end.stops.push(end.detokenizer.flush()) + end.stops.flush()
        return piece

    def result(self) -> GenerationResult:
        assert self.reason is not None, f"prompt {self.index} has not ended"
        # A stop string may end inside a step's tokens; the entries behind it belong to nothing.
        logprobs = self._logprobs[: len(self._token_ids)]
        return GenerationResult("".join(self._text), self._token_ids, self.reason, self._cached_tokens, logprobs, self._error)


def _config(model: str, settings: dict[str, Any]) -> EngineConfig:
    try:
        config = EngineConfig(model=model, **settings)
    except TypeError as error:
        raise ConfigError(f"LLM: {error}", hint="keywords are the fields of EngineConfig") from error
    if config.dp > 1:
        raise ConfigError(f"engine.dp is {config.dp}", hint="LLM runs one rank in this process; dix serve --dp N runs several")
    return config


def _per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling parameters for {count} prompts", hint="give one for all, or one per prompt")
    return list(params)
