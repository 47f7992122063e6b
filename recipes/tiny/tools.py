"""Tools: known and invented names, zero to three arguments of every JSON type, results, and requests that no tool can serve."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from recipes.tiny.chat import small_talk
from recipes.tiny.conversation import SYSTEM_TEXTS, Conversation, choose_effort, reason
from recipes.tiny.words import FIELD_VALUES, Source

NO_TOOLS = "I cannot do that without a tool."
NO_FITTING_TOOL = "None of my tools can do that."


@dataclass(frozen=True, slots=True)
class Tool:
    """request and answer are templates over the arguments and the result's fields."""

    name: str
    description: str
    parameters: dict[str, dict[str, Any]]
    values: dict[str, Callable[[Source], Any]]
    requests: tuple[str, ...]
    result: Callable[[Source], dict[str, Any]]
    answer: str


def _s(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


def _integer(low: int, high: int) -> Callable[[Source], int]:
    return lambda source: source.rng.randint(low, high)


KNOWN = (
    Tool(
        "get_weather",
        "Current weather of a city.",
        {"city": _s("City name")},
        {"city": Source.city},
        ("What is the weather in {city}?", "How is the weather in {city} now?", "Weather in {city}, please."),
        lambda s: {"temperature": s.rng.randint(-20, 40), "sky": s.pick(("clear", "cloudy", "rainy", "windy", "snowy"))},
        "In {city} it is {temperature} degrees and {sky}.",
    ),
    Tool(
        "lookup_tide",
        "Tide table for a harbour.",
        {"harbour": _s("Harbour"), "hours": {"type": "integer"}},
        {"harbour": Source.city, "hours": _integer(1, 48)},
        ("When is high tide in {harbour} within {hours} hours?", "High tide at {harbour}, next {hours} hours?"),
        lambda s: {"high": f"{s.rng.randint(0, 23):02d}:{s.digits(2)}"},
        "High tide in {harbour} is at {high}.",
    ),
    Tool(
        "save_note",
        "Store a short note.",
        {"text": _s("The note")},
        {"text": lambda s: f"{s.listed('verbs')} the {s.thing()}"},
        ("Save a note: {text}", "Please note this down: {text}"),
        lambda s: {"saved": True, "note_id": s.rng.randint(1, 999)},
        "Your note is saved with id {note_id}.",
    ),
    Tool(
        "send_email",
        "Send an email.",
        {"to": _s("Receiver"), "subject": _s("Subject"), "urgent": {"type": "boolean"}},
        {"to": lambda s: f"{s.made_up()}@{s.made_up(1)}.org", "subject": Source.thing, "urgent": lambda s: s.chance(0.5)},
        ('Send an email to {to} about "{subject}", urgent: {urgent}.', 'Email {to} with the subject "{subject}", urgent: {urgent}.'),
        lambda s: {"status": s.pick(("sent", "queued", "failed"))},
        "The email to {to} is {status}.",
    ),
    Tool(
        "convert_currency",
        "Convert an amount of money.",
        {"amount": {"type": "number"}, "source": _s("From"), "target": _s("To")},
        {
            "amount": lambda s: round(s.rng.uniform(1, 900), s.rng.randint(1, 2)),
            "source": lambda s: s.made_up(1).upper(),
            "target": lambda s: s.made_up(1).upper(),
        },
        ("Convert {amount} {source} to {target}.", "How much is {amount} {source} in {target}?"),
        lambda s: {"converted": round(s.rng.uniform(1, 900), 2)},
        "{amount} {source} is {converted} {target}.",
    ),
    Tool(
        "create_event",
        "Put an event into the calendar.",
        {"title": _s("Title"), "date": _s("Date"), "guests": {"type": "array", "items": {"type": "string"}}},
        {"title": Source.thing, "date": Source.date, "guests": lambda s: [s.name() for _ in range(s.rng.randint(1, 3))]},
        ('Create the event "{title}" on {date} with {guests}.', 'Plan "{title}" for {date}, guests: {guests}.'),
        lambda s: {"event": s.code()},
        "The event has the id {event}.",
    ),
    Tool(
        "get_time",
        "The current time.",
        {},
        {},
        ("What time is it?", "Tell me the time."),
        lambda s: {"time": f"{s.rng.randint(0, 23):02d}:{s.digits(2)}"},
        "It is {time}.",
    ),
    Tool(
        "list_files",
        "List the files of the current directory.",
        {},
        {},
        ("Which files are here?", "List the files."),
        lambda s: {"files": [f"{s.made_up()}.{s.pick(('txt', 'py', 'md'))}" for _ in range(s.rng.randint(1, 4))]},
        "The files are: {files}.",
    ),
    Tool(
        "read_file",
        "Read a file.",
        {"path": _s("Path of the file")},
        {"path": lambda s: f"{s.made_up()}/{s.made_up()}.{s.pick(('txt', 'py', 'md'))}"},
        ("What is in {path}?", "Show me the file {path}.", "Read {path}."),
        lambda s: {"text": s.thing()},
        'The file says "{text}".',
    ),
    Tool(
        "get_stock_price",
        "Price of a share.",
        {"symbol": _s("Symbol")},
        {"symbol": lambda s: s.made_up(1).upper()},
        ("What is the price of {symbol}?", "Price of {symbol} shares?"),
        lambda s: {"price": round(s.rng.uniform(1, 900), 2)},
        "{symbol} costs {price}.",
    ),
    Tool(
        "book_flight",
        "Book a flight.",
        {"origin": _s("From"), "destination": _s("To"), "options": {"type": "object"}},
        {
            "origin": Source.city,
            "destination": Source.city,
            "options": lambda s: {"seat": s.pick(("aisle", "window")), "bags": s.rng.randint(0, 3)},
        },
        (
            "Book a flight from {origin} to {destination} with the options {options}.",
            "I want to fly from {origin} to {destination}, options {options}.",
        ),
        lambda s: {"booking": s.code(), "price": s.rng.randint(50, 900)},
        "Booked: {booking} for {price}.",
    ),
    Tool(
        "set_timer",
        "Start a timer.",
        {"minutes": {"type": "integer"}},
        {"minutes": _integer(1, 120)},
        ("Set a timer for {minutes} minutes.", "Wake me in {minutes} minutes."),
        lambda s: {"timer": s.rng.randint(1, 99)},
        "Timer {timer} runs for {minutes} minutes.",
    ),
    Tool(
        "play_music",
        "Play a song.",
        {"artist": _s("Artist")},
        {"artist": Source.name},
        ("Play something by {artist}.", "I want to hear {artist}."),
        lambda s: {"song": s.thing()},
        'Now playing "{song}" by {artist}.',
    ),
)
TYPED: dict[str, Callable[[Source], Any]] = {
    "string": lambda s: str(s.pick((s.name, s.city, s.code, s.thing, s.made_up))()),
    "integer": _integer(0, 999),
    "number": lambda s: round(s.rng.uniform(0, 100), s.rng.randint(1, 2)),
    "boolean": lambda s: s.chance(0.5),
    "array": lambda s: [s.rng.choice((s.made_up, s.name))() for _ in range(s.rng.randint(1, 3))],
    "object": lambda s: {
        s.listed("fields"): s.rng.choice((s.rng.randint(0, 99), s.made_up(), s.chance(0.5))) for _ in range(s.rng.randint(1, 2))
    },
}


def _lookup(source: Source) -> Tool:
    """A tool that is found by its description: the request names what it looks up."""
    rng = source.rng
    asked, of = rng.choice(list(FIELD_VALUES)), source.listed("things")
    name = rng.choice((f"get_{asked}", f"find_{asked}", f"{source.made_up()}_{source.made_up(1)}", f"lookup_{source.made_up()}"))
    key = rng.choice((of, "name", "query", "id", source.listed("fields"), source.made_up()))
    made: Callable[[Source], Any] = rng.choice((Source.name, Source.code, Source.city, Source.project, Source.made_up))
    requests = tuple(
        text.format(f=asked, o=of, k="{" + key + "}")
        for text in (
            "What is the {f} of {k}?",
            "What is the {f} of the {o} {k}?",
            "Get the {f} of {k}.",
            "Tell me the {f} of the {o} {k}.",
            "Which {f} does {k} have?",
        )
    )
    return Tool(
        name,
        f"Get the {asked} of a {of}.",
        {key: {"type": "string"}},
        {key: made},
        requests,
        lambda s: {asked: str(FIELD_VALUES[asked](s))} if key != asked else {"value": s.code()},
        f"The {asked} of {{{key}}} is {{{asked if key != asked else 'value'}}}.",
    )


def invent(source: Source) -> Tool:
    """A tool whose name and parameters can only be read from the prompt."""
    if source.chance(0.3):
        return _lookup(source)
    rng = source.rng
    name = rng.choice(
        (
            f"{source.listed('verbs')}_{source.listed('things')}",
            f"{source.made_up()}_{source.made_up(1)}",
            f"{source.listed('verbs')}_{source.made_up()}",
        )
    )
    kinds = {}
    for _ in range(rng.choice((0, 1, 1, 2, 2, 3))):
        kinds[rng.choice((source.listed("fields"), source.made_up()))] = rng.choice(
            ("string", "string", "string", "integer", "number", "boolean", "array", "object")
        )
    told = " and ".join(f"{p} {{{p}}}" for p in kinds)
    asked = rng.choice(list(FIELD_VALUES))
    suffix = rng.choice((f" and tell me the {asked}.", f". What is the {asked}?"))
    requests = tuple(f"{verb} {name}{f' with {told}' if told else ''}{suffix}" for verb in ("Call", "Use", "Please run"))
    extra = {f: str(FIELD_VALUES[f](source)) for f in rng.sample(list(FIELD_VALUES), rng.randint(0, 2)) if f != asked}
    fields = [*extra, asked]
    rng.shuffle(fields)
    return Tool(
        name,
        f"{source.listed('verbs').capitalize()} the {source.thing()}.",
        {p: {"type": k} for p, k in kinds.items()},
        {p: TYPED[k] for p, k in kinds.items()},
        requests,
        lambda s: {f: extra.get(f) or FIELD_VALUES[f](s) for f in fields},
        f"The {asked} is {{{asked}}}.",
    )


def schema(tool: Tool) -> dict[str, Any]:
    parameters = {"type": "object", "properties": tool.parameters, "required": list(tool.parameters)}
    return {"type": "function", "function": {"name": tool.name, "description": tool.description, "parameters": parameters}}


def _spoken(value: Any) -> str:
    """A value as users and answers write it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else str(value)


def _fill(template: str, values: dict[str, Any], quote: bool = False) -> str:
    for key, value in values.items():
        text = json.dumps(value, ensure_ascii=False) if quote and not isinstance(value, str) else _spoken(value)
        template = template.replace("{" + key + "}", text)
    return template


def call_turn(c: Conversation, source: Source, tool: Tool) -> None:
    """Request, one or two calls, results and the answer."""
    twice = 2 if len(tool.parameters) == 1 and source.chance(0.15) else 1
    arguments = [{p: make(source) for p, make in tool.values.items()} for _ in range(twice)]
    invented = tool not in KNOWN
    request = source.rng.choice(tool.requests)
    texts = [_fill(request, a, quote=invented) for a in arguments]
    c.user(" ".join(texts))
    c.assistant("", reason(c, f"I need {tool.name}.", "The arguments are in the request."), [(tool.name, a) for a in arguments])
    results = [tool.result(source) for _ in arguments]
    c.tool_results([json.dumps(r, ensure_ascii=False) for r in results])
    answers = [_fill(tool.answer, a | r) for a, r in zip(arguments, results, strict=True)]
    c.assistant(" ".join(answers), reason(c, "The result has the answer."))


def _refused_turn(c: Conversation, source: Source, answer: str, offered: list[Tool]) -> None:
    names = {t.name for t in offered}
    tool = source.rng.choice([t for t in KNOWN if t.name not in names and t.name not in ("get_time",)])
    arguments = {p: make(source) for p, make in tool.values.items()}
    c.user(_fill(source.rng.choice(tool.requests), arguments))
    c.assistant(answer, reason(c, "No tool fits."))


def tool_use(source: Source, target_chars: int, thinking: float = 0.3) -> Conversation:
    """A conversation with tools; every call is answered from its result."""
    c = Conversation(effort=choose_effort(source, thinking), family="tool")
    rng = source.rng
    if source.chance(0.1):
        for _ in range(rng.randint(1, 3)):
            _refused_turn(c, source, NO_TOOLS, []) if source.chance(0.6) else small_talk(c, source)
        return c
    tools = [invent(source) if source.chance(0.45) else rng.choice(KNOWN) for _ in range(rng.randint(1, 4))]
    tools = list({t.name: t for t in tools}.values())
    for _ in range(max(1, min(6, rng.randint(1, 1 + max(target_chars, 1) // 1200)))):
        draw = source.rng.random()
        if draw < 0.84:
            call_turn(c, source, rng.choice(tools))
        elif draw < 0.92:
            small_talk(c, source)
        else:
            _refused_turn(c, source, NO_FITTING_TOOL, tools)
    c.system(rng.choice(SYSTEM_TEXTS) if source.chance(0.6) else "", tools=[schema(t) for t in tools])
    return c
