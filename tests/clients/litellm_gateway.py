"""LiteLLM against a running server, as a gateway uses it. Usage: litellm_gateway.py URL"""

import asyncio
import sys

import litellm

litellm.suppress_debug_info = True
URL = f"{sys.argv[1]}/v1"
ASK = {
    "model": "openai/tiny",
    "api_base": URL,
    "api_key": "none",
    "messages": [{"role": "user", "content": "hello"}],
    "temperature": 0,
    "max_tokens": 24,
    "extra_body": {"thinking": {"type": "disabled"}},
}
TOOL = {
    "type": "function",
    "function": {"name": "pick", "parameters": {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}},
}

whole = litellm.completion(**ASK)
streamed = list(litellm.completion(**ASK, stream=True, stream_options={"include_usage": True}))
joined = "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
assert joined == whole.choices[0].message.content, (joined, whole)
rebuilt = litellm.stream_chunk_builder(streamed, messages=ASK["messages"])
assert rebuilt.usage.completion_tokens == whole.usage.completion_tokens
print("ok stream")

thinking = litellm.completion(**{**ASK, "extra_body": {"thinking": {"type": "enabled"}}})
assert thinking.choices[0].message.reasoning_content
print("ok reasoning")

called = litellm.completion(**{**ASK, "max_tokens": 100}, tools=[TOOL], tool_choice="required")
assert called.choices[0].finish_reason == "tool_calls", called
assert called.choices[0].message.tool_calls[0].function.name == "pick"
print("ok tools")

asynchronous = asyncio.run(litellm.acompletion(**ASK))
assert asynchronous.choices[0].message.content == whole.choices[0].message.content
refusal = ""
try:
    litellm.completion(**{**ASK, "temperature": 5}, num_retries=0)
except litellm.BadRequestError as error:
    refusal = str(error)
assert "temperature" in refusal
print("ok async and errors")
