"""Facts planted over turns and asked for later, with fillers, small talk and other facts between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from recipes.tiny.chat import small_talk
from recipes.tiny.conversation import Conversation, add_system, choose_effort, reason
from recipes.tiny.words import Source


@dataclass(frozen=True, slots=True)
class Kind:
    """Wordings of one kind of fact; {s} is the subject and {v} the value."""

    subject: Callable[[Source], str]
    value: Callable[[Source], str]
    facts: tuple[str, ...]
    questions: tuple[str, ...]
    answer: str


def _fixed(text: str) -> Callable[[Source], str]:
    return lambda source: text


KINDS = (
    Kind(
        Source.name,
        Source.city,
        ("{s} lives in {v}.", "{s}'s home is in {v}.", "{s} has a flat in {v}."),
        ("Where does {s} live?", "In which city does {s} live?", "Which city is home for {s}?", "Tell me where {s} lives."),
        "{s} lives in {v}.",
    ),
    Kind(
        Source.name,
        lambda s: s.listed("jobs"),
        ("{s} works as a {v}.", "{s} is a {v}.", "The job of {s} is {v}."),
        ("What does {s} do for a living?", "What is the job of {s}?", "What is {s}'s job?"),
        "{s} works as a {v}.",
    ),
    Kind(
        Source.name,
        lambda s: s.listed("colors"),
        ("{s}'s favorite color is {v}.", "{s} likes {v} best of all colors."),
        ("What is {s}'s favorite color?", "Which color does {s} like best?"),
        "{s}'s favorite color is {v}.",
    ),
    Kind(
        Source.name,
        Source.code,
        ("The access code of {s} is {v}.", "{s} uses the access code {v}."),
        ("What is the access code of {s}?", "Which access code does {s} use?", "Tell me {s}'s access code."),
        "The access code of {s} is {v}.",
    ),
    Kind(
        lambda s: s.digits(4),
        Source.thing,
        ("Order {s} is a {v}.", "Order {s} contains a {v}."),
        ("What is in order {s}?", "What does order {s} contain?"),
        "Order {s} contains a {v}.",
    ),
    Kind(
        Source.name,
        Source.date,
        ("The meeting with {s} is on {v}.", "I meet {s} on {v}."),
        ("When is the meeting with {s}?", "On which date do I meet {s}?"),
        "The meeting with {s} is on {v}.",
    ),
    Kind(
        Source.thing,
        lambda s: s.listed("places"),
        ("The {s} is in the {v}.", "I left the {s} in the {v}."),
        ("Where is the {s}?", "Where did I leave the {s}?"),
        "The {s} is in the {v}.",
    ),
    Kind(
        Source.thing,
        Source.name,
        ("The {s} belongs to {v}.", "{v} owns the {s}."),
        ("Who owns the {s}?", "Whose is the {s}?", "To whom does the {s} belong?"),
        "The {s} belongs to {v}.",
    ),
    Kind(
        Source.project,
        Source.code,
        ("The password of project {s} is {v}.", "Project {s} has the password {v}."),
        ("What is the password of project {s}?", "Which password does project {s} have?"),
        "The password of project {s} is {v}.",
    ),
    Kind(
        Source.project,
        Source.name,
        ("Project {s} is led by {v}.", "{v} leads project {s}."),
        ("Who leads project {s}?", "Who is the lead of project {s}?"),
        "Project {s} is led by {v}.",
    ),
    Kind(
        Source.thing,
        Source.price,
        ("The {s} costs {v} euros.", "The price of the {s} is {v} euros."),
        ("How much is the {s}?", "What does the {s} cost?", "What is the price of the {s}?"),
        "The {s} costs {v} euros.",
    ),
    Kind(
        Source.name,
        lambda s: s.digits(s.rng.randint(3, 5)),
        ("{s}'s extension is {v}.", "You reach {s} at extension {v}."),
        ("What is {s}'s extension?", "At which extension do I reach {s}?"),
        "{s}'s extension is {v}.",
    ),
    Kind(
        Source.name,
        lambda s: str(s.rng.randint(18, 95)),
        ("{s} is {v} years old.", "{s} has turned {v}."),
        ("How old is {s}?", "What is {s}'s age?"),
        "{s} is {v} years old.",
    ),
    Kind(
        Source.name,
        lambda s: s.listed("foods"),
        ("{s} loves {v}.", "{s} likes to eat {v}."),
        ("What does {s} like to eat?", "Which food does {s} love?"),
        "{s} loves {v}.",
    ),
    Kind(
        _fixed("I"),
        Source.name,
        ("My name is {v}.", "I am {v}.", "Call me {v}."),
        ("What is my name?", "Who am I?", "Do you know my name?"),
        "Your name is {v}.",
    ),
    Kind(
        _fixed("I"),
        Source.city,
        ("I live in {v}.", "My home is in {v}."),
        ("Where do I live?", "In which city do I live?"),
        "You live in {v}.",
    ),
    Kind(
        _fixed("cat"),
        Source.made_up,
        ("My cat is called {v}.", "I have a cat named {v}."),
        ("What is my cat called?", "What is the name of my cat?"),
        "Your cat is called {v}.",
    ),
    Kind(
        _fixed("locker"),
        lambda s: s.digits(4),
        ("My locker code is {v}.", "The code of my locker is {v}."),
        ("What is my locker code?", "Which code does my locker have?"),
        "Your locker code is {v}.",
    ),
)
ACKNOWLEDGE = {1: "Noted.", 2: "Noted, both.", 3: "Noted, all three."}


@dataclass(slots=True)
class Fact:
    kind: Kind
    subject: str
    value: str
    statement: str

    def question(self, source: Source) -> str:
        return source.rng.choice(self.kind.questions).format(s=self.subject)

    @property
    def answer(self) -> str:
        return self.kind.answer.format(s=self.subject, v=self.value)


class Memory:
    """Facts of one conversation; a subject has one fact of a kind."""

    def __init__(self, source: Source) -> None:
        self.source, self.facts = source, {}

    def plant(self) -> Fact:
        while True:
            kind = self.source.rng.choice(KINDS)
            subject = kind.subject(self.source)
            if (kind.answer, subject) not in self.facts:
                value = kind.value(self.source)
                fact = Fact(kind, subject, value, self.source.rng.choice(kind.facts).format(s=subject, v=value))
                self.facts[kind.answer, subject] = fact
                return fact


def _plant_turn(c: Conversation, source: Source, memory: Memory) -> None:
    facts = [memory.plant() for _ in range(source.rng.choice((1, 1, 2, 3)))]
    parts = [f.statement for f in facts]
    for _ in range(source.rng.choice((0, 0, 1, 3))):
        parts.insert(source.rng.randint(0, len(parts)), source.sentence())
    c.user(source.pick(("", "", "", "Remember this: ", "Please remember: ", "Note: ")) + " ".join(parts))
    c.assistant(ACKNOWLEDGE[len(facts)], "The user tells me something to remember.")


def ask(c: Conversation, source: Source, fact: Fact) -> None:
    c.user(source.pick(("", "", "", "Please tell me: ", "One question. ")) + fact.question(source))
    c.assistant(fact.answer, reason(c, f"The user said: {fact.statement}", "That is the answer."))


def _filler_turn(c: Conversation, source: Source) -> None:
    lead = source.pick(("Here is some text to read.", "Please read this.", "Some background."))
    c.user(f"{lead} {source.sentences(source.rng.randint(3, 25))}")
    c.assistant("I have read it.", "Nothing is asked.")


def recall(source: Source, target_chars: int, thinking: float = 0.2, early: bool = False) -> Conversation:
    """A conversation of about `target_chars` characters; the last answers ask for facts from anywhere.

    early: one closing question only, about one of the first facts, so that the distance is about the length.
    """
    c = Conversation(effort=choose_effort(source, thinking), family="recall")
    memory, closing = Memory(source), 1 if early else source.rng.randint(2, 8)
    _plant_turn(c, source, memory)
    wordy = source.rng.random()
    while c.num_chars < target_chars - 90 * closing:
        draw = source.rng.random()
        if draw < 0.32:
            _plant_turn(c, source, memory)
        elif draw < 0.60:
            ask(c, source, source.rng.choice(list(memory.facts.values())))
        elif draw < 0.70:
            small_talk(c, source)
        elif target_chars > 1500 and source.chance(wordy):
            _filler_turn(c, source)
    known = list(memory.facts.values())
    known = known[: max(1, len(known) // 4)] if early else known
    for fact in source.rng.sample(known, min(closing, len(known))):
        ask(c, source, fact)
    add_system(c, source)
    return c
