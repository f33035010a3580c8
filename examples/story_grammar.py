"""A seeded generator of short English stories that knows how probable each of its stories is.

A story is drawn from the sentences in `story_plots.txt`; its people, places and things stay the
same from the first sentence to the last. Every choice is visible in the text, so the summed
log-probability of the choices is the entropy that a language model of these stories cannot beat.
"""

from __future__ import annotations

import math
import random
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

PLOTS_FILE = Path(__file__).with_name("story_plots.txt")

# Earlier alternatives are likelier, as words are in real text (Zipf). It also keeps the best two
# continuations well apart, so that greedy text does not depend on the last bit of a logit.
ZIPF_EXPONENT = 0.7
MEMORY_LIMIT = 4
INVENTED_NAME_FRACTION = 0.1
INVENTED_NAME_LETTERS = ("KVZYWG", "aeiou", "bdkvzg", "aeiou", "lnrsm", "ao")

ELDERS = {
    "Grandma": "girl", "Grandpa": "boy", "Mother": "girl", "Father": "boy",
    "Aunt Edda": "girl", "Uncle Bruno": "boy",
}  # fmt: skip
NEIGHBORS = {
    "Mrs. Bell": "girl", "Mr. Finch": "boy", "Mrs. Moss": "girl", "Mr. Reed": "boy",
    "Mrs. Lark": "girl", "Mr. Stone": "boy", "old Greta": "girl", "old Willem": "boy",
}  # fmt: skip
PRONOUNS = {
    "girl": {"he": "she", "him": "her", "his": "her", "himself": "herself", "girl": "girl"},
    "boy": {"he": "he", "him": "him", "his": "his", "himself": "himself", "girl": "boy"},
}
# Which prefix the pronoun slots of a person carry: {he} is the hero, {fhe} the friend.
PERSON_PREFIXES = {"hero": "", "friend": "f", "elder": "e", "neighbor": "n"}


@dataclass(frozen=True)
class Slot:
    """A place in a sentence where a word of the story goes."""

    name: str


# A part of a parsed sentence: plain text, a slot, or alternatives that are sentences again.
Node = str | Slot | list[list["Node"]]
Sentence = list[Node]


@dataclass(frozen=True)
class Place:
    """What belongs to one home, so that nobody finds a lighthouse in the mountains."""

    outside: str
    water: str
    spots: tuple[str, ...]


@dataclass(frozen=True)
class Grammar:
    """The parsed story file: word lists, places by home, sentences and plots by name."""

    lists: dict[str, tuple[str, ...]]
    places: dict[str, Place]
    macros: dict[str, list[Sentence]]
    plots: dict[str, list[list[Sentence]]]


@dataclass(frozen=True)
class Story:
    """One story. `nats` is minus the log-probability of all choices made, given earlier stories."""

    text: str
    nats: float
    plot: str
    words: dict[str, str] = field(repr=False)


def parse_sentence(text: str) -> Sentence:
    """Parse the bracket notation of one sentence. Raises ValueError if brackets do not match."""
    tokens = [token for token in re.split(r"([\[\]|]|\{\w+\})", text) if token]
    stack: list[list[Sentence]] = [[[]]]
    for token in tokens:
        if token == "[":
            stack.append([[]])
        elif token == "|" and len(stack) > 1:
            stack[-1].append([])
        elif token == "]" and len(stack) > 1:
            alternatives = stack.pop()
            stack[-1][-1].append(alternatives)
        elif token in "[|]":
            raise ValueError(f"unbalanced brackets in: {text}")
        elif token.startswith("{"):
            stack[-1][-1].append(Slot(token[1:-1]))
        else:
            stack[-1][-1].append(token)
    if len(stack) > 1:
        raise ValueError(f"unbalanced brackets in: {text}")
    return stack[0][0]


@cache
def load_grammar(path: Path = PLOTS_FILE) -> Grammar:
    """Read the story file. Raises ValueError if a line belongs to no section."""
    grammar = Grammar({}, {}, {}, {})
    macro: list[Sentence] | None = None
    plot: list[list[Sentence]] | None = None
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("# ") or line == "#":
            continue
        if line.startswith("$ "):
            name, words = line[2:].split(": ")
            grammar.lists[name] = tuple(words.split("|"))
        elif line.startswith("@ place: "):
            home, outside, water, spots = line.removeprefix("@ place: ").split("; ")
            grammar.places[home] = Place(outside, water, tuple(spots.split("|")))
        elif line.startswith("= "):
            macro, plot = [], None
            grammar.macros[line[2:]] = macro
        elif line.startswith("## "):
            macro, plot = None, [[]]
            grammar.plots[line[3:]] = plot
        elif not line and plot and plot[-1]:
            plot.append([])
        elif line and macro is not None:
            macro.append(parse_sentence(line))
        elif line and plot is not None:
            plot[-1].append(parse_sentence(line))
        elif line:
            raise ValueError(f"this line belongs to no section: {line}")
    return grammar


class Storyteller:
    """Tells one story after the other, without end, and avoids what it has just told.

    The same seed tells the same stories. Names, plots, places and words used in the last few
    stories are not drawn again, so that a greedy reader of these stories does not go in circles.
    """

    def __init__(self, seed: int | str, grammar: Grammar | None = None) -> None:
        self._grammar = grammar or load_grammar()
        self._random = random.Random(seed)
        self._recent: dict[str, deque[str]] = {}
        self._words: dict[str, str] = {}
        self._nats = 0.0

    def tell(self) -> Story:
        """Draw the next story; its paragraphs are separated by blank lines and it ends with one."""
        self._words, self._nats = {}, 0.0
        plot = self._pick_fresh("plot", tuple(self._grammar.plots))
        paragraphs: list[str] = []
        for sentences in self._grammar.plots[plot]:
            drawn = (self._expand(sentence) for sentence in sentences)
            paragraphs.append(" ".join(sentence for sentence in drawn if sentence))
        text = "\n\n".join(paragraph for paragraph in paragraphs if paragraph) + "\n\n"
        return Story(text, self._nats, plot, dict(self._words))

    def _expand(self, sentence: Sentence) -> str:
        parts: list[str] = []
        for node in sentence:
            if isinstance(node, str):
                parts.append(node)
            elif isinstance(node, Slot):
                parts.append(self._fill(node.name))
            else:
                parts.append(self._expand(node[self._pick(len(node))]))
        return "".join(parts)

    def _fill(self, slot: str) -> str:
        key = slot[0].lower() + slot[1:]
        if key in self._grammar.macros:
            text = self._draw_macro(key)
        else:
            if key not in self._words:
                self._bind(key)
            text = self._words[key]
        return text[0].upper() + text[1:] if slot != key else text

    def _draw_macro(self, name: str) -> str:
        sentences = self._grammar.macros[name]
        index = self._pick_fresh(name, tuple(str(i) for i in range(len(sentences))))
        return self._expand(sentences[int(index)])

    def _bind(self, key: str) -> None:
        base = key.rstrip("0123456789")
        if base in self._grammar.lists:
            taken = {self._words.get(base + digit) for digit in ("", "1", "2", "3")}
            options = tuple(word for word in self._grammar.lists[base] if word not in taken)
            self._words[key] = self._pick_fresh(base, options)
        elif base in ("spot", "home", "outside", "water"):
            self._bind_place(key, base)
        else:
            self._bind_person(key)

    def _bind_place(self, key: str, base: str) -> None:
        if "home" not in self._words:
            home = self._pick_fresh("home", tuple(self._grammar.places))
            place = self._grammar.places[home]
            self._words |= {"home": home, "outside": place.outside, "water": place.water}
        if base == "spot":
            taken = set(self._words.values())
            spots = self._grammar.places[self._words["home"]].spots
            free = [spot for spot in spots if spot not in taken]
            self._words[key] = free[self._pick(len(free))]

    def _bind_person(self, key: str) -> None:
        role = next(
            (r for r, p in PERSON_PREFIXES.items() if key == r or _is_pronoun(key, p)), None
        )
        if role is None:
            raise ValueError(f"no such slot: {{{key}}}")
        if role in ("hero", "friend"):
            name, gender = self._draw_child()
        else:
            people = ELDERS if role == "elder" else NEIGHBORS
            name = self._pick_fresh(role, tuple(people))
            gender = people[name]
        self._words[role] = name
        for word, form in PRONOUNS[gender].items():
            self._words[PERSON_PREFIXES[role] + word] = form

    def _draw_child(self) -> tuple[str, str]:
        invented = self._random.random() < INVENTED_NAME_FRACTION
        chance = INVENTED_NAME_FRACTION if invented else 1 - INVENTED_NAME_FRACTION
        self._nats -= math.log(chance)
        if invented:
            return self._invent_name()
        girls, boys = self._grammar.lists["girl_name"], self._grammar.lists["boy_name"]
        names = tuple(name for pair in zip(girls, boys, strict=True) for name in pair)
        name = self._pick_fresh("name", names)
        return name, "girl" if name in girls else "boy"

    def _invent_name(self) -> tuple[str, str]:
        """Compose a name that no list holds, so that a model learns to copy and not to recall.

        Every letter is one draw, so the log-probability is exact. A name in "a" is a girl's.
        """
        name = "".join(self._draw_letter(letters) for letters in INVENTED_NAME_LETTERS)
        return name, "girl" if name.endswith("a") else "boy"

    def _draw_letter(self, letters: str) -> str:
        self._nats += math.log(len(letters))
        return self._random.choice(letters)

    def _pick_fresh(self, name: str, options: tuple[str, ...]) -> str:
        """Pick one option that is not among the last picks of that name."""
        # A story has two names, and one word of everything else.
        limit = 2 * MEMORY_LIMIT if name == "name" else MEMORY_LIMIT
        memory = min(limit, len(options) // 3)
        recent = self._recent.setdefault(name, deque(maxlen=2 * MEMORY_LIMIT))
        avoid = set(list(recent)[-memory:]) if memory else set[str]()
        fresh = [option for option in options if option not in avoid]
        choice = fresh[self._pick(len(fresh))]
        recent.append(choice)
        return choice

    def _pick(self, count: int) -> int:
        weights = zipf_weights(count)
        index = self._random.choices(range(count), weights)[0]
        self._nats -= math.log(weights[index])
        return index


@cache
def zipf_weights(count: int) -> Sequence[float]:
    """Return `count` probabilities, in falling order, that sum to one."""
    raw = [(rank + 1) ** -ZIPF_EXPONENT for rank in range(count)]
    total = sum(raw)
    return [weight / total for weight in raw]


def _is_pronoun(key: str, prefix: str) -> bool:
    return key.startswith(prefix) and key[len(prefix) :] in PRONOUNS["girl"]
