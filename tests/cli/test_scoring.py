"""Held-out prompts as chat requests: what the server renders is what the engine is asked directly."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer_cli.scoring import CacheProof, ask_server, chat_body
from engine.eval_prompts import Reply, load_prompts
from engine.models.tiny import TRAINED_DIR, ensure_tiny
from engine.tokenizer import Tokenizer
from server.encoding import load_encoder
from server.rendering import RenderOptions, render_chat


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Any:
    assert TRAINED_DIR.is_dir()
    return ensure_tiny(tmp_path_factory.mktemp("models"))


def test_every_held_out_prompt_survives_the_way_through_a_chat_request(directory: Any) -> None:
    encoder, tokenizer = load_encoder(directory, trust=False), Tokenizer.from_dir(directory)
    prompts, _ = load_prompts()
    for prompt in prompts[::7]:
        assert render_chat(encoder, tokenizer, chat_body(prompt), RenderOptions(constrained=True)).prompt == prompt.render(), prompt.set


class ScriptedApi:
    """Answers like a server whose cache is wrong for one prompt."""

    def __init__(self, wrong: str) -> None:
        self.wrong = wrong
        self.bodies: list[dict[str, Any]] = []

    def post(self, path: str, body: dict[str, Any], timeout_s: float = 0) -> Any:
        assert path == "/v1/chat/completions"
        self.bodies.append(body)
        text = body["messages"][-1]["content"]
        said = "other" if body.get("prefix_cache") and text == self.wrong else text
        usage = {"prompt_tokens": 300, "prompt_tokens_details": {"cached_tokens": 128 if body.get("prefix_cache") else 0}}
        return {"choices": [{"message": {"content": said, "tool_calls": None}}], "usage": usage}


def test_an_answer_that_the_cache_changes_is_counted() -> None:
    asked = [p for p in load_prompts()[0] if p.set == "chat"][:3]
    api: Any = ScriptedApi(asked[1].messages[-1]["content"])
    proof = CacheProof()
    replies = ask_server(api, "tiny", proof, lambda name, share: None)("chat", asked)
    assert proof == CacheProof(prompts=3, prompt_tokens=900, hits=3, hit_tokens=384, different=1)
    assert replies == [Reply(asked[0].messages[-1]["content"]), Reply("other"), Reply(asked[2].messages[-1]["content"])]
    # One session a prompt, so that a router keeps its requests together; the first request only stores.
    assert len({b["session_id"] for b in api.bodies}) == 3
    assert sorted(b["max_tokens"] for b in api.bodies)[:3] == [1, 1, 1]
