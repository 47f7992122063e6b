"""Random words, names and values. Held-out sources draw list words that training never sees; made-up names are new by chance."""

from __future__ import annotations

import json
import random
import re
import string
import zlib
from functools import lru_cache

from engine.models.tiny import TOKENIZER_FILE
from engine.models.tiny_text import LISTS, library_texts

MORE_NAMES = (
    "Abel Agnes Albert Alma Amir Anton Aria Arthur Astrid Axel Bella Bruno Camille Cecil Celia Chloe Conrad Dalia Dario Diego "
    "Dora Edgar Edith Elias Ella Erik Esther Farid Flora Gina Greta Hanna Harold Helen Henry Ida Igor Ines Ingrid Irene Isaac "
    "Jana Jasper Jonas Judith Kofi Lara Lars Lila Linda Lorenzo Luca Marco Marta Max Milan Mira Monica Nadia Nils Odette Otto "
    "Petra Pia Quinn Rafael Ravi Rosalind Sandra Selma Stefan Sven Tara Tomas Ursula Vera Viktor Wanda Xenia Yara Yusuf Zara "
)
MORE_CITIES = (
    "Accra Antwerp Baku Bilbao Bogota Bologna Bordeaux Bristol Bruges Cardiff Cordoba Dakar Dresden Edinburgh Genoa Ghent "
    "Glasgow Granada Graz Hanoi Havana Istanbul Jakarta Kiel Leipzig Lucerne Malmo Manila Marseille Medellin Nantes Nice "
    "Odense Palermo Perth Reykjavik Salzburg Santiago Seville Tallinn Tampere Trieste Tunis Uppsala Valencia Verona Vilnius "
    "Yerevan Zagreb "
)
FOODS = (
    "apples bread cheese cherries dumplings figs lentils mango noodles olives pancakes pasta peaches pears pizza plums rice "
    "salad soup sushi tacos "
)
PLACES = (
    "attic balcony barn basement cabin cellar corridor garage garden hall kitchen library lobby office porch shed shop stable "
    "studio tower workshop "
)
MONTHS = ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December"]
ONSETS = [
    "b",
    "br",
    "c",
    "d",
    "dr",
    "f",
    "g",
    "gr",
    "h",
    "j",
    "k",
    "kl",
    "l",
    "m",
    "n",
    "p",
    "pr",
    "qu",
    "r",
    "s",
    "st",
    "t",
    "tr",
    "v",
    "w",
    "x",
    "y",
    "z",
]
VOWELS = ["a", "e", "i", "o", "u", "ai", "ei", "ou"]
CODAS = ["", "", "", "l", "m", "n", "r", "s", "x", "nd", "rt"]


@lru_cache(maxsize=32)
def _split(kind: str, held_out: bool) -> list[str]:
    """The words of one list on one side of the split, about a fifth held out."""
    extra = {"names": MORE_NAMES, "cities": MORE_CITIES}.get(kind, "")
    words = FOODS if kind == "foods" else PLACES if kind == "places" else f"{LISTS[kind]} {extra}"
    return [word for word in words.split() if (zlib.crc32(word.encode()) % 5 == 0) == held_out]


@lru_cache(maxsize=1)
def prose() -> list[str]:
    """Sentences of the standard library's documentation, for fillers."""
    found = []
    for text in library_texts():
        for paragraph in re.split(r"\n\s*\n", text):
            line = " ".join(paragraph.split())
            found += [s for s in re.split(r"(?<=[.])\s+", line) if 30 < len(s) < 160 and s[0].isupper() and s.endswith(".") and s.isascii()]
    return sorted(set(found))


@lru_cache(maxsize=1)
def vocabulary_words() -> list[str]:
    """Every word of the tokenizer's vocabulary, as spelled there.

    A word that is one token must be an answer now and then, or its output row is only ever pushed down and it can never be copied.
    """
    tokens = json.loads(TOKENIZER_FILE.read_text(encoding="utf-8"))["model"]["vocab"]
    words = {token.removeprefix("\u0120") for token in tokens}
    return sorted(word for word in words if len(word) > 1 and word.isascii() and word.isalpha())


class Source:
    """All randomness of one conversation.

    In training a share of all words comes from the whole vocabulary; held-out list words occur there, but never more often than any other.
    """

    def __init__(self, seed: int | str, held_out: bool = False) -> None:
        self.rng = random.Random(seed)
        self.held_out = held_out

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def pick(self, items: list | tuple) -> object:
        return self.rng.choice(items)

    def any_word(self) -> str:
        return self.rng.choice(vocabulary_words())

    def listed(self, kind: str) -> str:
        if not self.held_out and self.chance(0.3):
            return self.any_word()
        return self.rng.choice(_split(kind, self.held_out))

    def made_up(self, syllables: int | None = None) -> str:
        rng = self.rng
        if not self.held_out and self.chance(0.3):
            return self.any_word()
        return "".join(rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS) for _ in range(syllables or rng.choice((2, 2, 3))))

    def name(self) -> str:
        return self.listed("names") if self.chance(0.6) else self._capital()

    def city(self) -> str:
        return self.listed("cities") if self.chance(0.75) else self._capital()

    def project(self) -> str:
        return self._capital()

    def _capital(self) -> str:
        word = self.made_up()
        return word[0].upper() + word[1:]

    def thing(self) -> str:
        return f"{self.listed('colors' if self.chance(0.5) else 'adjectives')} {self.listed('things')}"

    def digits(self, count: int) -> str:
        return "".join(self.rng.choice(string.digits) for _ in range(count))

    def code(self) -> str:
        rng, upper = self.rng, string.ascii_uppercase
        style = rng.randrange(4)
        if style == 0:
            return self.digits(rng.randint(3, 6))
        if style == 1:
            return f"{rng.choice(upper)}{rng.choice(upper)}-{self.digits(rng.randint(2, 4))}"
        if style == 2:
            return "".join(rng.choice(upper + string.digits) for _ in range(rng.randint(4, 6)))
        return f"{self.made_up(1)}{self.digits(rng.randint(2, 3))}"

    def date(self) -> str:
        rng = self.rng
        if self.chance(0.5):
            return f"{rng.randint(1990, 2030)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
        return f"{rng.randint(1, 28)} {rng.choice(MONTHS)}"

    def price(self) -> str:
        return f"{self.rng.randint(1, 999)}.{self.digits(2)}" if self.chance(0.4) else str(self.rng.randint(1, 9999))

    def sentence(self) -> str:
        """A filler sentence: half from templates, half from the library's documentation."""
        if self.chance(0.5):
            return self.rng.choice(prose())
        slots = {"n": self.name, "c": self.city, "t": lambda: self.listed("things"), "a": lambda: self.listed("adjectives")}
        slots |= {"v": lambda: self.listed("verbs"), "m": lambda: self.listed("animals"), "o": lambda: self.listed("colors")}
        slots |= {"d": lambda: str(self.rng.randint(2, 500)), "j": lambda: self.listed("jobs"), "w": lambda: self.listed("things")}
        slots |= {"k": self.code, "y": self.date}
        return re.sub(r"\{(\w)\}", lambda m: slots[m.group(1)](), self.rng.choice(LISTS["sentences"]))

    def sentences(self, count: int) -> str:
        return " ".join(self.sentence() for _ in range(count))


FIELD_VALUES = {
    "city": Source.city,
    "country": lambda s: s.made_up().capitalize(),
    "status": lambda s: s.pick(("open", "closed", "paid", "late", "new", "sent")),
    "price": Source.price,
    "amount": Source.price,
    "total": Source.price,
    "quantity": lambda s: str(s.rng.randint(1, 500)),
    "code": Source.code,
    "color": lambda s: s.listed("colors"),
    "owner": Source.name,
    "customer": Source.name,
    "author": Source.name,
    "date": Source.date,
    "speed": lambda s: str(s.rng.randint(1, 300)),
    "weight": Source.price,
    "level": lambda s: str(s.rng.randint(1, 99)),
    "role": lambda s: s.listed("jobs"),
    "product": lambda s: s.listed("things"),
    "item": lambda s: s.listed("things"),
    "department": lambda s: s.pick(("sales", "support", "design", "finance", "research", "legal")),
    "currency": lambda s: s.made_up(1).upper(),
    "title": Source.thing,
    "email": lambda s: f"{s.made_up()}@{s.made_up(1)}.org",
    "phone": lambda s: s.digits(6),
    "time": lambda s: f"{s.rng.randint(0, 23):02d}:{s.digits(2)}",
    "key": lambda s: s.made_up(),
    "version": lambda s: f"{s.rng.randint(0, 9)}.{s.rng.randint(0, 30)}",
    "unit": lambda s: s.made_up(1),
    "score": lambda s: s.digits(2),
    "label": lambda s: s.made_up(),
}
