"""The generator behind the demo model: repeatable, consistent, and honest about its entropy."""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


def load_example(name: str) -> ModuleType:
    """Import a script from `examples/`, which is not a package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


grammar = load_example("story_grammar")

TINY_GRAMMAR = """
$ thing: cup|jug
= call
Hello!
Hey!
## first
{call} [A|One [big|small]] {thing} fell[, alas|].

The {thing} broke[| in two], but the {thing2} did not.
"""


@pytest.fixture(scope="module")
def stories() -> list:
    teller = grammar.Storyteller("test")
    return [teller.tell() for _ in range(300)]


@pytest.fixture
def tiny(tmp_path: Path):
    path = tmp_path / "plots.txt"
    path.write_text(TINY_GRAMMAR, encoding="utf-8")
    return grammar.load_grammar(path)


def test_storyteller_repeats_itself_for_one_seed_only() -> None:
    one, same, other = (grammar.Storyteller(seed) for seed in (7, 7, 8))

    first = [one.tell() for _ in range(5)]

    assert [same.tell() for _ in range(5)] == first
    assert [other.tell() for _ in range(5)] != first


def test_storyteller_tells_plain_prose(stories: list) -> None:
    for story in stories:
        assert story.text.endswith(".\n\n")
        assert story.text.count("\n\n") == 3
        assert not re.search(r"[\[\]{}|]|  | [.,!?]|[.!?]{2}|\ba [aeiou]", story.text), story.text
        assert 120 < len(story.text.split()) < 320
        assert story.text.count('"') % 2 == 0


def test_story_nats_are_the_exact_log_probability(tiny) -> None:
    texts = Counter()
    nats = {}
    num_draws = 4_000
    for seed in range(num_draws):
        story = grammar.Storyteller(seed, tiny).tell()
        texts[story.text] += 1
        assert nats.setdefault(story.text, story.nats) == pytest.approx(story.nats)

    total = sum(math.exp(-cost) for cost in nats.values())
    text, count = texts.most_common(1)[0]

    assert len(nats) == 2 * 3 * 2 * 2 * 2  # every text of this grammar was drawn
    assert total == pytest.approx(1.0)
    assert count / num_draws == pytest.approx(math.exp(-nats[text]), rel=0.1)


def test_story_nats_take_earlier_stories_into_account(tmp_path: Path) -> None:
    path = tmp_path / "plots.txt"
    path.write_text("$ thing: cup|jug|hat|pot\n## first\nA {thing}.\n", encoding="utf-8")
    loaded = grammar.load_grammar(path)
    pairs = {}
    for seed in range(300):
        teller = grammar.Storyteller(seed, loaded)
        one, two = teller.tell(), teller.tell()
        pairs[one.text, two.text] = one.nats + two.nats

    assert len(pairs) == 4 * 3
    assert sum(math.exp(-cost) for cost in pairs.values()) == pytest.approx(1.0)


def test_story_nats_count_listed_and_invented_names(tmp_path: Path) -> None:
    path = tmp_path / "plots.txt"
    path.write_text("$ girl_name: Mia\n$ boy_name: Tom\n## p\n{hero} ran.\n", encoding="utf-8")
    loaded = grammar.load_grammar(path)
    told = [grammar.Storyteller(seed, loaded).tell() for seed in range(300)]
    costs = {story.words["hero"]: story.nats for story in told}
    num_names = math.prod(len(letters) for letters in grammar.INVENTED_NAME_LETTERS)

    listed = math.exp(-costs.pop("Mia")) + math.exp(-costs.pop("Tom"))

    assert listed == pytest.approx(1 - grammar.INVENTED_NAME_FRACTION)
    assert len(costs) > 10
    for cost in costs.values():
        assert math.exp(-cost) * num_names == pytest.approx(grammar.INVENTED_NAME_FRACTION)


def test_story_mentions_only_its_own_people_and_place(stories: list) -> None:
    loaded = grammar.load_grammar()
    names = {*loaded.lists["girl_name"], *loaded.lists["boy_name"]}
    everybody = {*names, *grammar.ELDERS, *grammar.NEIGHBORS}
    for story in stories:
        cast = {story.words[role] for role in grammar.PERSON_PREFIXES if role in story.words}
        strangers = {name for name in everybody - cast if re.search(rf"\b{name}\b", story.text)}
        places = [place for home, place in loaded.places.items() if home != story.words["home"]]
        elsewhere = [spot for place in places for spot in place.spots]
        forms = {story.words.get(prefix + "he") for prefix in grammar.PERSON_PREFIXES.values()}

        assert not strangers, story.text
        assert not any(spot in story.text for spot in elsewhere), story.text
        if forms <= {"she", None}:
            assert not re.search(r"\b([Hh]e|[Hh]is|[Hh]im|himself|boy)\b", story.text), story.text


@pytest.mark.parametrize(
    ("plot", "slot"), [("lost", "toy"), ("share", "toy"), ("broken", "fragile")]
)
def test_story_keeps_its_thing_from_beginning_to_end(stories: list, plot: str, slot: str) -> None:
    things = grammar.load_grammar().lists[slot]
    told = [story for story in stories if story.plot == plot]
    for story in told:
        mentioned = {thing for thing in things if re.search(rf"\b{thing}\b", story.text)}
        assert mentioned == {story.words[slot]}, story.text
        assert all(story.words[slot] in part for part in story.text.strip().split("\n\n"))
    assert told


def test_storyteller_does_not_tell_the_same_plot_or_hero_again_soon(stories: list) -> None:
    for number, story in enumerate(stories[4:], start=4):
        recent = stories[number - 4 : number]
        assert story.plot not in {earlier.plot for earlier in recent}
        assert story.words["hero"] not in {earlier.words["hero"] for earlier in recent}


@pytest.mark.parametrize("sentence", ["a [b", "a b]", "[a|[b]", "a | b"])
def test_sentence_with_unbalanced_brackets_is_refused(sentence: str) -> None:
    with pytest.raises(ValueError, match="unbalanced"):
        grammar.parse_sentence(sentence)


def test_unknown_slot_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plots.txt"
    path.write_text("## odd\nA {dragon} came.\n", encoding="utf-8")

    with pytest.raises(ValueError, match="dragon"):
        grammar.Storyteller(0, grammar.load_grammar(path)).tell()


def test_bundled_held_out_text_comes_from_this_grammar() -> None:
    text = (ROOT / "models" / "shoal-stories" / "heldout.txt").read_text(encoding="utf-8")
    teller = grammar.Storyteller("heldout-text")

    told = text.removesuffix("</s>").split("</s>")

    assert told == [teller.tell().text for _ in told]
