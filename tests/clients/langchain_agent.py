"""LangChain's ChatOpenAI with tools against a running server. Usage: langchain_agent.py URL"""

import sys
from typing import Literal

from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


@tool
def weather(city: Literal["Paris", "Oslo"]) -> str:
    """Tell the weather of a city."""
    return f"sunny in {city}"


class Answer(BaseModel):
    """Yes or no."""

    yes: bool


options = {"base_url": f"{sys.argv[1]}/v1", "api_key": "none", "model": "tiny", "temperature": 0, "max_retries": 0}
model = ChatOpenAI(**options, max_tokens=120, extra_body={"thinking": {"type": "disabled"}})

whole = model.invoke("hello")
chunks = list(model.stream("hello", stream_usage=True))
assert "".join(chunk.content for chunk in chunks) == whole.content
assert whole.usage_metadata["output_tokens"] == whole.response_metadata["token_usage"]["completion_tokens"]
print("ok stream")

history = [SystemMessage("You are terse."), HumanMessage("What is the weather in Oslo?")]
forced = model.bind_tools([weather], tool_choice="weather")
asked = forced.invoke(history)
assert [call["name"] for call in asked.tool_calls] == ["weather"] * len(asked.tool_calls)
assert asked.tool_calls[0]["args"]["city"] in ("Paris", "Oslo"), asked
gathered = None
for chunk in forced.stream(history):
    gathered = chunk if gathered is None else gathered + chunk
assert gathered.tool_calls[0]["args"] == asked.tool_calls[0]["args"]
results = [ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]) for call in asked.tool_calls]
final = model.bind_tools([weather]).invoke([*history, asked, *results])
assert final.response_metadata["finish_reason"] in ("stop", "length", "tool_calls")
print("ok tools")

parsed = model.with_structured_output(Answer, method="json_schema").invoke("Is water wet?")
assert isinstance(parsed, Answer)
print("ok structured")
