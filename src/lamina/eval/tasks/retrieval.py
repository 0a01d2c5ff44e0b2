"""Long contexts made on the spot: facts among filler and near-identical distractors, at any length in tokens.

A fact that differs from all else in a prompt is found by almost every model through almost every cache. So each fact
here has neighbours that differ from it in one character, and naming one of theirs is wrong.
"""

import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

from lamina.errors import ConfigError
from lamina.eval.tasks.base import Item, cut, encode, render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CLASSES = ("0123456789", "aeiou", "bdfgklmnprstvz")
_EXAMPLE = "17"
_COLOURS = ("amber", "blue", "coral", "green", "indigo", "olive", "pink", "silver", "violet", "white")
_ANIMALS = ("badger", "crane", "falcon", "heron", "lynx", "marten", "otter", "raven", "stoat", "walrus")
_KINDS = ("broad", "damp", "early", "faded", "narrow", "patient", "quiet", "steep", "tired", "wooden")
_THINGS = ("baker", "bridge", "carpet", "farmer", "gate", "kettle", "ladder", "neighbour", "orchard", "pilot", "tailor")
_DEEDS = ("brushes past", "faces", "greets", "leans on", "outlasts", "passes", "recalls", "shelters", "waits for")
_WHERES = (
    "after the rain",
    "at noon",
    "behind the mill",
    "by the river",
    "in the valley",
    "most evenings",
    "near town",
)


@dataclass(frozen=True)
class Puzzle:
    """What a prompt is made of, but for its length.

    Attributes
    ----------
    context : str
        What comes before everything.
    facts : tuple of str
        Sentences in the order in which they stand in the prompt.
    depths : tuple of float
        Where each stands, ascending from 0 (before the filler) to 1 (after it).
    filler : callable
        The next filler sentence.
    question, lead : str
        The question, and the first words of its answer.
    answers, wrong : tuple of str
        See :class:`lamina.eval.tasks.base.Item`.
    """

    context: str
    facts: tuple[str, ...]
    depths: tuple[float, ...]
    filler: Callable[[], str]
    question: str
    lead: str
    answers: tuple[str, ...]
    wrong: tuple[str, ...]


@dataclass(frozen=True)
class LongContext(ABC):
    """A kind of puzzle at a length.

    Attributes
    ----------
    tokens : int
        Most tokens of a prompt; it has as many whole filler sentences as fit.
    chat : bool
        Ask in the tokenizer's chat template.
    """

    tokens: int
    chat: bool = False

    kind: ClassVar[str]
    max_new_tokens: ClassVar[int] = 64
    stop: ClassVar[tuple[str, ...]] = (".",)

    @property
    def name(self) -> str:
        """Kind and length."""
        return f"{self.kind}-{self.tokens}"

    @abstractmethod
    def puzzle(self, rng: random.Random) -> Puzzle:
        """A new puzzle."""

    def items(self, n: int, seed: int, tokenizer: "PreTrainedTokenizerBase") -> list[Item]:
        """See :class:`lamina.eval.tasks.base.Task`; fewer items of a seed are the first of more.

        Raises
        ------
        ConfigError
            ``tokens`` holds not even the facts and the question, or ``chat`` finds no template.
        """
        return [self._item(f"{self.name}-{seed}-{i}", tokenizer) for i in range(n)]

    def grade(self, item: Item, text: str) -> bool:
        """Whether the first sentence names every answer and nothing that is wrong, as whole words."""
        named = set(re.findall(r"\w+(?:-\w+)*", cut(text.lstrip(), (*self.stop, "\n"))))
        return named.issuperset(item.answers) and named.isdisjoint(item.wrong)

    def _item(self, name: str, tokenizer: "PreTrainedTokenizerBase") -> Item:
        rng = random.Random(name)
        puzzle = self.puzzle(rng)
        filler: list[str] = []

        def prompt(sentences: int) -> str:
            filler.extend(puzzle.filler() for _ in range(sentences - len(filler)))
            context = f"{puzzle.context}\n\n{_interleaved(puzzle, filler[:sentences])}"
            return render(tokenizer, context=context, question=puzzle.question, chat=self.chat, lead=puzzle.lead)

        most = _most_that_fit(lambda sentences: len(encode(tokenizer, prompt(sentences))), self.tokens)
        return Item(name, prompt(most), puzzle.answers, puzzle.wrong)


@dataclass(frozen=True)
class Keyed(LongContext):
    """Puzzles about one key among others that differ from it in one digit, or in the order of two.

    Attributes
    ----------
    distractors : int
        Other keys, at most 35; fewer make it easier.
    """

    distractors: int = 4

    @property
    def name(self) -> str:
        """Kind, length, and how many distractors where they are not as many as usual."""
        return super().name + ("" if self.distractors == Keyed.distractors else f"-{self.distractors}")


@dataclass(frozen=True)
class MultiKey(Keyed):
    """One code among those of near-identical keys."""

    kind = "multi-key"

    def puzzle(self, rng: random.Random) -> Puzzle:
        """See :class:`LongContext`."""
        key, others = _near_keys(rng, self.distractors)
        codes = _different_numbers(rng, len(others) + 1)
        return _codes_puzzle(
            rng, [(key, codes[0])], list(zip(others, codes[1:])), "What is the code of {}?", "code", "is"
        )


@dataclass(frozen=True)
class MultiValue(Keyed):
    """All codes of one key, among those of near-identical keys, which have one code each.

    Attributes
    ----------
    values : int
        Codes of the right key.
    """

    values: int = 3
    kind = "multi-value"

    def puzzle(self, rng: random.Random) -> Puzzle:
        """See :class:`LongContext`."""
        _require("values", self.values, 1)
        key, others = _near_keys(rng, self.distractors)
        codes = _different_numbers(rng, len(others) + self.values)
        right = [(key, code) for code in codes[: self.values]]
        question = f"What are all {self.values} codes of {{}}?"
        return _codes_puzzle(rng, right, list(zip(others, codes[self.values :])), question, "codes", "are")


@dataclass(frozen=True)
class VariableTracking(LongContext):
    """All variables that hold a number, directly or through other variables.

    Attributes
    ----------
    hops : int
        Assignments after the first in each chain.
    chains : int
        Other chains, at most 35, whose numbers and names each differ in one character from those of the right one.
    """

    hops: int = 1
    chains: int = 1
    kind = "variable-tracking"

    def puzzle(self, rng: random.Random) -> Puzzle:
        """See :class:`LongContext`."""
        _require("hops", self.hops, 0)
        values = _with_neighbours(rng, str(rng.randrange(10_000, 100_000)), self.chains)
        families = _families(rng, 2 * (self.hops + 1), self.chains)
        names, example = families[: self.hops + 1], [family[0] for family in families[self.hops + 1 :]]
        chains = [_chain(value, own) for value, own in zip(values, zip(*names), strict=True)]
        turns = [chain for chain in range(len(chains)) for _ in range(self.hops + 1)]
        rng.shuffle(turns)
        sentences = [iter(chain) for chain in chains]
        facts = tuple(next(sentences[chain]) for chain in turns)
        return Puzzle(
            "Numbers are put into variables, and copied to others, between other sentences. Keep track of all of them. "
            f"Example: {' '.join(_chain(_EXAMPLE, example))}",
            facts,
            _depths(rng, len(facts)),
            lambda: _filler(rng),
            f"Which {self.hops + 1} variables is the number {_EXAMPLE} in, and which is the number {values[0]} in?",
            f"The number {_EXAMPLE} is in the variables {' and '.join(example)}. "
            f"The number {values[0]} is in the variables",
            tuple(family[0] for family in names),
            (*(name for family in names for name in family[1:]), *example),
        )


@dataclass(frozen=True)
class Aggregation(LongContext):
    """The most frequent words of many lists; each has a rarer rival that differs in one letter.

    Attributes
    ----------
    words : int
        Words to name.
    times : int
        Occurrences of each in a list, at least 2; of its rival there is one.
    """

    words: int = 1
    times: int = 3
    kind = "aggregation"

    def puzzle(self, rng: random.Random) -> Puzzle:
        """See :class:`LongContext`."""
        _require("words", self.words, 1)
        _require("times", self.times, 2)
        families = _families(rng, self.words, 1)
        taken = {word for family in families for word in family}
        rare = [word for word in (_pseudoword(rng) for _ in range(50 * self.words)) if word not in taken]

        def sentence() -> str:
            words = [word for often, rival in families for word in (*[often] * self.times, rival)]
            words += rng.sample(rare, self.words)
            rng.shuffle(words)
            return f"List: {', '.join(words)}."

        return Puzzle(
            "Here are lists of words.",
            (),
            (),
            sentence,
            f"Which words are the {self.words} most frequent in all lists together?",
            f"The most frequent {'word is' if self.words == 1 else 'words are'}",
            tuple(often for often, _ in families),
            (*(rival for _, rival in families), *rare),
        )


def neighbours(word: str) -> list[str]:
    """All words that differ in one digit, vowel or consonant, or in the order of two digits side by side."""
    found = {
        word[:i] + c + word[i + 1 :] for i in range(len(word)) for kind in _CLASSES if word[i] in kind for c in kind
    }
    for i in range(len(word) - 1):
        if word[i : i + 2].isdigit():
            found.add(word[:i] + word[i + 1] + word[i] + word[i + 2 :])
    return sorted(found - {word})


def _require(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name} is {value}; it must be at least {least}.")


def _with_neighbours(rng: random.Random, word: str, count: int) -> list[str]:
    """``word`` and some of its neighbours, none of which begins with 0."""
    near = [other for other in neighbours(word) if other[0] != "0"]
    if not 0 <= count <= len(near):
        raise ConfigError(f"{count} distractors are wanted, and {word} has {len(near)} neighbours. Ask for 0 to 35.")
    return [word, *rng.sample(near, count)]


def _near_keys(rng: random.Random, count: int) -> tuple[str, list[str]]:
    """A key and ``count`` distractors."""
    numbers = _with_neighbours(rng, str(rng.randrange(1_000, 10_000)), count)
    key, *others = (f"{colour}-{animal}-{number}" for colour, animal in [_pair(rng)] for number in numbers)
    return key, others


def _pair(rng: random.Random) -> tuple[str, str]:
    return rng.choice(_COLOURS), rng.choice(_ANIMALS)


def _families(rng: random.Random, count: int, size: int) -> list[list[str]]:
    """Words that share no member, each with ``size`` neighbours."""
    families: list[list[str]] = []
    while len(families) < count:
        family = _with_neighbours(rng, _pseudoword(rng), size)
        if not any(set(family) & set(other) for other in families):
            families.append(family)
    return families


def _chain(value: str, names: Sequence[str]) -> list[str]:
    """Assignments after which all names hold the value."""
    return [f"The number {value} is in {names[0]}.", *(f"What is in {a} is also in {b}." for a, b in pairwise(names))]


def _pseudoword(rng: random.Random) -> str:
    _, vowels, consonants = _CLASSES
    return "".join(rng.choice(kind) for kind in (consonants, vowels, consonants, vowels, consonants))


def _different_numbers(rng: random.Random, count: int) -> list[str]:
    return [str(number) for number in rng.sample(range(100_000, 1_000_000), count)]


def _depths(rng: random.Random, count: int) -> tuple[float, ...]:
    return tuple(sorted(rng.random() for _ in range(count)))


def _filler(rng: random.Random) -> str:
    kind, other = rng.sample(_KINDS, 2)
    thing, another = rng.sample(_THINGS, 2)
    return f"The {kind} {thing} {rng.choice(_DEEDS)} the {other} {another} {rng.choice(_WHERES)}."


def _codes_puzzle(
    rng: random.Random, right: list[tuple[str, str]], others: list[tuple[str, str]], question: str, noun: str, verb: str
) -> Puzzle:
    """Codes of keys at random depths, in random order."""
    key = right[0][0]
    facts = [f"The code of {name} is {code}." for name, code in right + others]
    rng.shuffle(facts)
    return Puzzle(
        "Codes of keys are hidden between other sentences. Many keys look alike. Remember each.",
        tuple(facts),
        _depths(rng, len(facts)),
        lambda: _filler(rng),
        question.format(key),
        f"The {noun} of {key} {verb}",
        tuple(code for _, code in right),
        tuple(code for _, code in others),
    )


def _interleaved(puzzle: Puzzle, filler: list[str]) -> str:
    """Filler with every fact at its depth."""
    sentences: list[str] = []
    done = 0
    for fact, depth in zip(puzzle.facts, puzzle.depths):
        at = round(depth * len(filler))
        sentences += [*filler[done:at], fact]
        done = at
    return " ".join(sentences + filler[done:])


def _most_that_fit(count: Callable[[int], int], tokens: int) -> int:
    """The number of sentences with which a prompt has at most ``tokens``, and with one more has more.

    ``count`` is close to linear, so that interpolation takes a few calls.
    """
    low, high = 0, 16
    least, most = count(low), count(high)
    if least > tokens:
        raise ConfigError(
            f"tokens is {tokens}, but facts and question alone have {least}. Raise it, or lower the number of facts."
        )
    while most <= tokens:
        low, least = high, most
        high = round(high * max(1.5, 1.02 * tokens / most))
        most = count(high)
    while high - low > 1:
        guess = low + (high - low) * (tokens - least) // (most - least)
        guess = min(max(guess, low + 1), high - 1)
        if (length := count(guess)) > tokens:
            high, most = guess, length
        else:
            low, least = guess, length
    return low
