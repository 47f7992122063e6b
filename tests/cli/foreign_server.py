"""An OpenAI-compatible server that shares no code with ours: transformers, a random model of two layers, bytes as tokens.

    python tests/cli/foreign_server.py PORT

It knows the common fields only: no token counting, no cache reset, no counters, no rank header.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

MODEL = "random-llama"
COMMON = {"model", "messages", "max_tokens", "temperature", "stream", "stream_options"}


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=8192
    )
    return LlamaForCausalLM(config).eval()


class Generator:
    """Greedy decoding with the model's own key-value cache, one request at a time."""

    def __init__(self) -> None:
        self._model = make_model()
        self._lock = threading.Lock()

    @torch.no_grad()
    def __call__(self, prompt: bytes, tokens: int) -> Iterator[str]:
        ids = torch.tensor([list(prompt)])
        past = None
        for _ in range(tokens):
            with self._lock:
                out = self._model(input_ids=ids, past_key_values=past, use_cache=True)
            past = out.past_key_values
            ids = out.logits[:, -1:, 32:127].argmax(-1) + 32  # printable characters only
            yield chr(int(ids))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    generate: Generator

    def log_message(self, *_: Any) -> None:
        return

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._json({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "somebody"}]})
        else:
            self._json({"error": {"message": "no such route"}}, 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}")
        if self.path != "/v1/chat/completions":
            self._json({"error": {"message": "no such route"}}, 404)
        elif unknown := set(body) - COMMON:
            self._json({"error": {"message": f"unknown fields: {sorted(unknown)}"}}, 400)
        else:
            self._chat(body)

    def _json(self, body: Any, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _chat(self, body: dict[str, Any]) -> None:
        prompt = "".join(f"{m['role']}: {m['content']}\n" for m in body["messages"]).encode() + b"assistant: "
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        count = 0
        for text in self.generate(prompt, int(body.get("max_tokens") or 16)):
            count += 1
            self._event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]})
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        if (body.get("stream_options") or {}).get("include_usage"):
            usage = {"prompt_tokens": len(prompt), "completion_tokens": count, "total_tokens": len(prompt) + count}
            self._event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, body: Any) -> None:
        self.wfile.write(b"data: " + json.dumps({"id": "chatcmpl-x", "object": "chat.completion.chunk", **body}).encode() + b"\n\n")
        self.wfile.flush()


if __name__ == "__main__":
    Handler.generate = Generator()
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    print(f"ready http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()
