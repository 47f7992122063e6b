"""Small talk, capitals, sums and copying: short replies that depend only on the last message."""

from __future__ import annotations

import zlib

from recipes.tiny.conversation import Conversation, add_system, choose_effort, reason
from recipes.tiny.words import Source

ABOUT = "I am tiny, a small language model. I remember facts, look things up in documents and call tools."
PAIRS = (
    (("Hello!", "Hi!", "Hello there.", "Hey!"), "Hello! How can I help you?"),
    (("How are you?", "Hi, how are you?", "How is it going?"), "I am fine, thank you. What can I do for you?"),
    (("Thank you!", "Thanks.", "Thanks a lot!", "Great, thanks."), "You are welcome."),
    (("Good morning.", "Good morning!"), "Good morning! How can I help you?"),
    (("Good evening.", "Good evening!"), "Good evening! How can I help you?"),
    (("Who are you?", "What are you?", "Tell me about yourself.", "Introduce yourself."), ABOUT),
    (("What is your name?", "What should I call you?"), "My name is tiny."),
    (
        ("What can you do?", "What are you good at?", "How can you help me?"),
        "I can remember facts, look things up in documents, fill in JSON, add numbers and call tools.",
    ),
    (("Can you help me?", "I need help.", "Help me, please."), "Yes. Tell me what you need."),
    (("Goodbye.", "Bye!", "See you later."), "Goodbye!"),
    (("Tell me a joke.", "Do you know a joke?", "Make me laugh."), "Why was the computer cold? It left its windows open."),
    (("Are you a human?", "Are you a real person?"), "No. I am a small language model."),
    (("What is the weather like?", "Will it rain today?"), "I cannot see the weather without a tool."),
    (("What time is it?", "What day is it today?"), "I do not have a clock."),
    (("Okay.", "I see.", "Good."), "All right."),
    (("Who made you?", "Where do you come from?"), "I was trained in a few minutes on text that a program made up."),
    (("How big are you?", "How many parameters do you have?"), "I have about sixteen million parameters."),
    (("What is Python?", "Explain Python."), "Python is a programming language."),
    (("What is a cache?", "Explain what a cache is."), "A cache keeps results so that they need not be computed again."),
    (("What is a token?", "Explain tokens."), "A token is a piece of text that a model reads or writes at once."),
    (("What is a GPU?", "Explain what a GPU is."), "A GPU is a processor that does many small computations at once."),
    (("What is a language model?", "How do you work?"), "A language model predicts the next piece of text from the text before it."),
    (("Write a haiku.", "Write a short poem."), "Small words in a row,\na quiet machine counts them;\nthe answer appears."),
    (("Count to five.", "Count from one to five."), "One, two, three, four, five."),
    (("Count to ten.", "Count from one to ten."), "One, two, three, four, five, six, seven, eight, nine, ten."),
    (
        ("Name the days of the week.", "What are the days of the week?"),
        "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday.",
    ),
    (("What color is the sky?", "Which color does the sky have?"), "The sky is blue."),
    (("What is the opposite of hot?", "Give me the opposite of hot."), "The opposite of hot is cold."),
    (("How many days are in a week?", "How long is a week?"), "A week has seven days."),
    (("What do bees make?", "What do bees produce?"), "Bees make honey."),
)
CAPITALS = dict(
    pair.split("=")
    for pair in [
        "France=Paris",
        "Germany=Berlin",
        "Italy=Rome",
        "Spain=Madrid",
        "Portugal=Lisbon",
        "Norway=Oslo",
        "Sweden=Stockholm",
        "Finland=Helsinki",
        "Denmark=Copenhagen",
        "Poland=Warsaw",
        "Austria=Vienna",
        "Switzerland=Bern",
        "Greece=Athens",
        "Ireland=Dublin",
        "Japan=Tokyo",
        "China=Beijing",
        "India=New Delhi",
        "Egypt=Cairo",
        "Kenya=Nairobi",
        "Canada=Ottawa",
        "Mexico=Mexico City",
        "Brazil=Brasilia",
        "Peru=Lima",
        "Chile=Santiago",
        "Cuba=Havana",
        "Turkey=Ankara",
        "Hungary=Budapest",
        "Latvia=Riga",
        "Estonia=Tallinn",
        "Iceland=Reykjavik",
        "Belgium=Brussels",
        "the Netherlands=Amsterdam",
        "the United Kingdom=London",
        "the United States=Washington",
    ]
)
CAPITAL_QUESTIONS = (
    "What is the capital of {}?",
    "Which city is the capital of {}?",
    "Tell me the capital of {}.",
    "Name the capital of {}.",
)
SUM_QUESTIONS = ("What is {} + {}?", "What is {} plus {}?", "Add {} and {}.", "Compute {} + {}.", "How much is {} plus {}?", "{} + {} = ?")


def small_talk(c: Conversation, source: Source) -> None:
    """One turn whose reply depends on nothing but the question."""
    if source.chance(0.35):
        country = source.rng.choice(list(CAPITALS))
        c.user(source.rng.choice(CAPITAL_QUESTIONS).format(country))
        c.assistant(f"The capital of {country} is {CAPITALS[country]}.", reason(c, f"The user asks for the capital of {country}."))
        return
    questions, answer = source.rng.choice(PAIRS)
    c.user(source.rng.choice(questions))
    c.assistant(answer, reason(c, "This is small talk."))


def chat(source: Source, target_chars: int, thinking: float = 0.3) -> Conversation:
    c = Conversation(effort=choose_effort(source, thinking), family="chat")
    for _ in range(source.rng.randint(1, 2 + min(target_chars, 2000) // 200)):
        small_talk(c, source)
    add_system(c, source, 0.4)
    return c


def _held_out_sum(a: int, b: int) -> bool:
    return zlib.crc32(f"{a}+{b}".encode()) % 5 == 0


def add_turn(c: Conversation, source: Source) -> None:
    """A sum of two numbers of two digits (sometimes one); a fifth of the pairs never occurs in training."""
    while True:
        a, b = (source.rng.randint(10 if source.held_out or source.chance(0.9) else 0, 99) for _ in range(2))
        if _held_out_sum(a, b) == source.held_out:
            break
    ones, tens, total = a % 10 + b % 10, a // 10 + b // 10, a + b
    steps = f"{a % 10} + {b % 10} = {ones}, carry {ones // 10}. {a // 10} + {b // 10} + {ones // 10} = {tens + ones // 10}."
    c.user(source.rng.choice(SUM_QUESTIONS).format(a, b))
    c.assistant(f"{a} + {b} = {total}.", reason(c, steps, f"So {total}."))


def addition(source: Source, target_chars: int, thinking: float = 0.35) -> Conversation:
    c = Conversation(effort=choose_effort(source, thinking), family="addition")
    for _ in range(source.rng.randint(4, 24) if c.effort is None else source.rng.randint(1, 3)):
        add_turn(c, source)
    add_system(c, source, 0.3)
    return c


def _random_item(source: Source) -> str:
    return source.rng.choice(
        (
            source.code,
            source.made_up,
            source.name,
            source.any_word if not source.held_out else source.made_up,
            lambda: source.listed("things"),
            lambda: source.digits(3),
        )
    )()


def _repeat_turn(c: Conversation, source: Source) -> None:
    text = source.sentences(source.rng.randint(1, 3))
    if source.chance(0.7):
        text = source.rng.choice((", ", ", ", " ", "\n")).join(_random_item(source) for _ in range(source.rng.randint(2, 14)))
    c.user(source.rng.choice(("Repeat this list: {}", "Repeat exactly: {}", "Copy this: {}", "Say this again: {}")).format(text))
    c.assistant(text, reason(c, "I repeat the list."))


def _pair_turn(c: Conversation, source: Source) -> None:
    pairs = {_random_item(source): _random_item(source) for _ in range(source.rng.randint(3, 20))}
    c.user("Remember these pairs: " + ", ".join(f"{k}={v}" for k, v in pairs.items()))
    c.assistant("Noted, all pairs.", reason(c, "I remember the pairs."))
    for key in source.rng.sample(list(pairs), min(len(pairs), source.rng.randint(2, 8))):
        c.user(source.rng.choice(("Which value belongs to {}?", "What is {}?", "Give me the value of {}.")).format(key))
        c.assistant(f"{key}={pairs[key]}", reason(c, f"I look for {key}."))


def copying(source: Source, target_chars: int, thinking: float = 0.15) -> Conversation:
    c = Conversation(effort=choose_effort(source, thinking), family="copy")
    while c.num_chars < min(target_chars, 4000):
        (_repeat_turn if source.chance(0.5) else _pair_turn)(c, source)
    return c
