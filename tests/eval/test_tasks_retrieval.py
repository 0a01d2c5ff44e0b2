"""Retrieval prompts: their length in tokens, where facts stand, and that no distractor passes for an answer."""

import re

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lamina.errors import ConfigError
from lamina.eval.tasks.base import Item, Task, encode
from lamina.eval.tasks.retrieval import (
    Aggregation,
    LongContext,
    MultiKey,
    MultiValue,
    VariableTracking,
    neighbours,
)
from tiny_llama import make_tokenizer

KINDS = (MultiKey, MultiValue, VariableTracking, Aggregation)
TOKENS = 3000
SENTENCE = re.compile(r"[^.]+\.")


def items(task: LongContext, n: int = 6, seed: int = 0) -> list[Item]:
    return task.items(n, seed, make_tokenizer())


def body(item: Item) -> list[str]:
    """Sentences of the context."""
    return [s.strip() for s in SENTENCE.findall(item.prompt.split("\n\n")[1])]


@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_same_items_and_other_seeds_other_items(kind: type[LongContext]) -> None:
    task: Task = kind(TOKENS)
    tokenizer = make_tokenizer()
    first = task.items(6, 0, tokenizer)
    assert first == task.items(6, 0, tokenizer) and first[:2] == task.items(2, 0, tokenizer)
    drawn = [item for seed in range(8) for item in task.items(6, seed, tokenizer)]
    assert len({item.id for item in drawn}) == len({item.prompt for item in drawn}) == 48
    assert len({item.answers for item in drawn}) == 48
    assert all(item.id.startswith(f"{task.name}-") for item in drawn)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_as_many_whole_sentences_as_fit_and_never_more(kind: type[LongContext], chat: bool) -> None:
    tokenizer = make_tokenizer()
    for tokens in (1500, 1501, 2048, 5000, 20_000):
        for item in kind(tokens, chat=chat).items(3, 1, tokenizer):
            length = len(encode(tokenizer, item.prompt))
            # A sentence of this tokenizer, a token a byte, with the space before it.
            assert tokens - max(len(s) + 1 for s in body(item)) < length <= tokens
    [longer] = kind(20_001, chat=chat).items(1, 1, tokenizer)
    assert len(encode(tokenizer, longer.prompt)) > 19_900


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_hold_where_tokens_merge_across_words(kind: type[LongContext]) -> None:
    tokenizer = _merging_tokenizer()
    for tokens in (700, 1000, 3001):
        for item in kind(tokens).items(3, 0, tokenizer):
            length = len(encode(tokenizer, item.prompt))
            longest = max(len(encode(tokenizer, " " + s)) for s in body(item))
            assert tokens - longest - 1 <= length <= tokens


@pytest.mark.parametrize("kind", KINDS)
def test_too_few_tokens_are_refused(kind: type[LongContext]) -> None:
    with pytest.raises(ConfigError, match=r"tokens is 90, but facts and question alone have [1-9]"):
        items(kind(90))
    with pytest.raises(ConfigError, match="no chat template"):
        kind(TOKENS, chat=True).items(1, 0, make_tokenizer(None))


@pytest.mark.parametrize("kind", KINDS)
def test_answers_pass_in_any_order_and_nothing_less_or_more_does(kind: type[LongContext]) -> None:
    task = kind(TOKENS)
    for item in items(task):
        assert item.wrong and not set(item.answers) & set(item.wrong)
        for said in (item.answers, item.answers[::-1]):
            assert task.grade(item, " " + ", ".join(said) + ".")
            assert task.grade(item, "\n**" + "** and **".join(said) + "**\nand more")
        everything = ", ".join(item.answers)
        for wrong in item.wrong:
            assert not task.grade(item, f" {wrong}.") and not task.grade(item, f" {everything}, {wrong}.")
            assert task.grade(item, f" {everything}. Not {wrong}."), "the first sentence counts"
        for i in range(len(item.answers)):
            rest = item.answers[:i] + item.answers[i + 1 :]
            assert not task.grade(item, f" {', '.join(rest)}.")
            assert not task.grade(item, f" {', '.join((*rest, item.answers[i][:-1]))}.")
            assert not task.grade(item, f" {', '.join((*rest, item.answers[i] + '0'))}."), "a part of a word is none"
        assert not task.grade(item, "")


@pytest.mark.parametrize("values", [1, 4])
def test_codes_stand_once_each_at_keys_that_differ_in_one_digit(values: int) -> None:
    task = MultiKey(TOKENS, distractors=9) if values == 1 else MultiValue(TOKENS, values=values, distractors=9)
    for item in items(task):
        facts = [m.groups() for s in body(item) if (m := re.fullmatch(r"The code of (\S+) is (\d+)\.", s))]
        assert len(facts) == 9 + values
        key = re.search(r"code(?:s)? of (\S+)\?", item.prompt).group(1)  # type: ignore[union-attr]
        assert sorted(code for name, code in facts if name == key) == sorted(item.answers)
        assert sorted(code for name, code in facts if name != key) == sorted(item.wrong)
        assert all(len(re.findall(rf"\b{code}\b", item.prompt)) == 1 for code in item.answers + item.wrong)
        others = {name for name, _ in facts} - {key}
        assert len(others) == 9 and all(_one_step(key, other) for other in others)


def test_variables_of_the_right_chain_and_no_others_hold_the_number() -> None:
    task = VariableTracking(TOKENS, hops=3, chains=4)
    for item in items(task):
        held: dict[str, str] = {}
        for sentence in body(item):
            if m := re.fullmatch(r"The number (\d+) is in (\w+)\.", sentence):
                assert m[2] not in held
                held[m[2]] = m[1]
            elif m := re.fullmatch(r"What is in (\w+) is also in (\w+)\.", sentence):
                assert m[2] not in held
                held[m[2]] = held[m[1]]
        asked = re.findall(r"\d+", item.prompt)[-1]
        assert {name for name, value in held.items() if value == asked} == set(item.answers)
        assert {name for name, value in held.items() if value != asked} == set(item.wrong[:-4])
        assert len(item.answers) == 4 and len(item.wrong) == 4 * 4 + 4 and len(set(item.answers + item.wrong)) == 24
        example = " and ".join(item.wrong[-4:])
        lead = f"The number 17 is in the variables {example}. The number {asked} is in the variables"
        assert item.prompt.endswith(f"Answer: {lead}")
        assert all(_one_step(asked, other) for other in set(held.values()) - {asked})
        assert all(sum(_one_step(name, other) for other in item.wrong[:-4]) >= 4 for name in item.answers)


def test_the_right_words_are_the_most_frequent_and_rivals_are_near() -> None:
    task = Aggregation(TOKENS, words=3, times=2)
    for item in items(task):
        words = re.findall(r"\w+", item.prompt.split("\n\n")[1].replace("List:", ""))
        counts = {word: words.count(word) for word in set(words)}
        lists = len(body(item))
        assert [counts.pop(word) for word in item.answers] == [2 * lists] * 3
        assert max(counts.values()) == lists and set(counts) <= set(item.wrong)
        assert all(_one_step(a, b) for a, b in zip(item.answers, item.wrong))


def test_facts_stand_at_all_depths() -> None:
    depths = []
    for item in items(MultiKey(TOKENS), 40):
        sentences = body(item)
        depths += [i / len(sentences) for i, s in enumerate(sentences) if item.answers[0] in s]
    quarters = [sum(low <= d < low + 0.25 for d in depths) for low in (0, 0.25, 0.5, 0.75)]
    assert len(depths) == 40 and min(quarters) >= 4


def test_neighbours_are_one_step_away_and_of_the_same_kind() -> None:
    near = neighbours("4127")
    assert {"4172", "1427", "4217", "4128", "9127"} <= set(near) and "4127" not in near and len(near) == 36 + 3
    assert near == sorted(set(near)) and all(_one_step("4127", other) for other in near)
    assert len(neighbours("1111")) == 36
    assert "batoz" not in neighbours("kitoz") and {"katoz", "bitoz"} <= set(neighbours("kitoz"))
    assert all(re.fullmatch("[^aeiou][aeiou][^aeiou]", other) for other in neighbours("tab"))


@pytest.mark.parametrize("count", [-1, 40])
def test_more_distractors_than_neighbours_are_refused(count: int) -> None:
    with pytest.raises(ConfigError, match=f"{count} distractors are wanted"):
        items(MultiKey(TOKENS, distractors=count))
    assert len(items(MultiKey(5000, distractors=33), 1)[0].wrong) == 33


@pytest.mark.parametrize(
    "task",
    [
        MultiValue(TOKENS, values=0),
        VariableTracking(TOKENS, hops=-1),
        Aggregation(TOKENS, times=1),
        Aggregation(1, words=0),
    ],
)
def test_puzzles_without_an_answer_are_refused(task: LongContext) -> None:
    with pytest.raises(ConfigError, match=r"(values|hops|times|words) is -?\d; it must be at least \d"):
        items(task)


@pytest.mark.parametrize("distractors", [0, 35])
def test_all_numbers_of_distractors_work_with_every_key(distractors: int) -> None:
    for task in (MultiKey(8000, distractors=distractors), VariableTracking(20_000, chains=distractors)):
        for item in items(task, 20):
            assert len(set(item.wrong)) == len(item.wrong) >= distractors


def _one_step(a: str, b: str) -> bool:
    """One character replaced, or two side by side swapped."""
    differ = [i for i, (x, y) in enumerate(zip(a, b)) if x != y]
    if len(a) != len(b) or not 1 <= len(differ) <= 2:
        return False
    swapped = len(differ) == 2 and differ[1] == differ[0] + 1 and a[differ[0]] == b[differ[1]]
    return len(differ) == 1 or (swapped and a[differ[1]] == b[differ[0]])


def _merging_tokenizer() -> PreTrainedTokenizerFast:
    """Byte pairs learned from the sentences of a prompt."""
    texts = [item.prompt for kind in KINDS for item in items(kind(TOKENS), 2, seed=9)]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(texts, trainer)
    assert any("Ġ" in token[1:-1] for token in backend.get_vocab()), "tokens span words"
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_fewer_distractors_are_another_task() -> None:
    assert MultiKey(1024).name == "multi-key-1024" and MultiKey(1024, distractors=1).name == "multi-key-1024-1"
    for count in (0, 2):
        (item,) = MultiValue(1600, distractors=count).items(1, 0, make_tokenizer())
        assert len(item.wrong) == count and len(item.answers) == 3
