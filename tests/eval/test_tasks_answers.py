"""Word problems: which are drawn, how they are asked, and which texts count as right."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from lamina.errors import ConfigError, DataError
from lamina.eval.tasks.answers import RESERVED, Answers, close, final_number
from lamina.eval.tasks.base import Item, Task, encode
from tiny_llama import make_tokenizer

NUMBERS: list[tuple[str, float | None]] = [
    ("42", 42),
    ("It is 42.", 42),
    ("first 3, then 4, so 7!", 7),
    ("a total of $1,234.50.", 1234.5),
    ("1,234,567.", 1234567),
    ("(1,234)", 1234),
    ("1,234, and no more", 1234),
    ("1,2,3", 3),
    ("1,2345", 2345),
    ("1{,}234", 1234),
    ("9284017268534.4", 9284017268534.4),
    ("0.0016791648", 0.0016791648),
    (".5", 0.5),
    ("-.5", -0.5),
    ("-5", -5),
    ("−5", -5),
    ("= -5", -5),
    ("-$5", -5),
    ("$-5", -5),
    ("£7", 7),
    ("\\$18", 18),
    ("20 - 5", 5),
    ("16-3", 3),
    ("(5)-3", 3),
    ("5-10", 10),
    ("COVID-19", 19),
    ("3/4 cup", 0.75),
    ("24 = 6/2", 3),
    ("2 1/2 hours", 2.5),
    ("\\frac{-3}{4}", -0.75),
    ("\\boxed{\\dfrac{3}{4}} of 8", 0.75),
    ("3/4.5", 4.5),
    ("1/0", 0),
    ("1e3", 1000),
    ("1.5E+06", 1.5e6),
    ("2.5 x 10^6", 2.5e6),
    ("2.5 \\times 10^{6} m", 2.5e6),
    ("3 × 10^-2", 0.03),
    ("42km", 42),
    ("100 m2", 100),
    ("50 m^2", 50),
    ("50 \\text{ m}^{2}", 50),
    ("x1 is 8 and x2", 8),
    ("12.5%", 12.5),
    ("the 2nd", 2),
    ("**18**", 18),
    ("7 + 8 = 15\n#### 15\nThat took 2 steps", 15),
    ("#### $1,000 in 3 days", 1000),
    ("####\nso 7", 7),
    ("5 so 6 ####", 6),
    ("\\boxed{42} after 3 days", 42),
    ("1/" + "9" * 400, 0),
    ("none", None),
    ("", None),
]


def write(path: Path, records: list[Any]) -> Path:
    text = "".join(json.dumps(record) + "\n" for record in records).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def problems(count: int) -> list[dict[str, str]]:
    return [
        {"question": f"What is {i} + 1?", "answer": f"{i} + 1 = <<{i}+1={i + 1}>>{i + 1}.\n#### {i + 1:,}"}
        for i in range(900, 900 + count)
    ]


@pytest.mark.parametrize(("text", "value"), NUMBERS)
def test_final_number(text: str, value: float | None) -> None:
    assert final_number(text) == value


@pytest.mark.parametrize(
    ("value", "target", "right"),
    [
        (18, 18, True),
        (18.001, 18, False),
        (17.999, 18, False),
        (9284017268535, 9284017268534, False),
        (14053029.67, 14053029.666666666, True),
        (14053029.66, 14053029.666666666, False),
        (14053030, 14053029.666666666, False),
        (0.00168, 0.0016791648, True),
        (0.0017, 0.0016791648, False),
        (0, 0.0016791648, False),
        (-2.5, 2.5, False),
        (float("inf"), 2.5, False),
        (float("nan"), 2.0, False),
    ],
)
def test_close_is_exact_for_integers_and_rounds_others(value: float, target: float, right: bool) -> None:
    assert close(value, target) is right


def test_same_seed_same_items_other_seeds_other_items_and_no_example_is_asked(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    task: Task = Answers(write(tmp_path / "sums.jsonl", problems(RESERVED + 60)), shots=RESERVED)
    drawn = [task.items(20, seed, tokenizer) for seed in range(3)]
    assert drawn[1] == task.items(20, 1, tokenizer)
    asked = [item.prompt.rpartition("Question: ")[2] for items in drawn for item in items]
    assert len(set(asked)) == 60, "three seeds share nothing until the file is used up"
    shown = drawn[0][0].prompt.rpartition("Question: ")[0]
    assert all(question not in shown for question in asked) and shown.count("Question: ") == RESERVED
    fewer = Answers(tmp_path / "sums.jsonl", shots=2).items(20, 0, tokenizer)
    assert [item.id for item in fewer] == [item.id for item in drawn[0]], "the number of examples changes no item"
    assert task.items(60, 1, tokenizer) == task.items(60, 0, tokenizer), "then it starts again"


def test_a_prompt_shows_steps_without_notes_and_ends_where_the_answer_begins(tmp_path: Path) -> None:
    path = write(tmp_path / "sums.jsonl.gz", problems(RESERVED + 1))
    [item] = Answers(path, shots=1).items(1, 0, make_tokenizer())
    context, example, asked = item.prompt.split("\n\n")
    question, answer = example.removeprefix("Question: ").split("\nAnswer: ")
    i = int(question.split()[2])
    assert answer == f"{i} + 1 = {i + 1}.\n#### {i + 1:,}"
    assert asked.endswith("?\nAnswer:") and item.id.startswith("sums-") and "####" in context
    line = int(item.id.removeprefix("sums-"))
    assert asked == f"Question: What is {900 + line} + 1?\nAnswer:" and item.answers == (f"{901 + line:,}",)


def test_a_conversation_has_one_turn_an_example_and_one_special_token_before_it(tmp_path: Path) -> None:
    tokenizer, path = make_tokenizer(), write(tmp_path / "sums.jsonl", problems(RESERVED + 1))
    task = Answers(path, shots=2, chat=True)
    [item] = task.items(1, 0, tokenizer)
    roles = [turn.partition("\n")[0] for turn in item.prompt.split("<s>")[1:]]
    assert roles == ["user", "assistant"] * 3 and item.prompt.endswith("<s>assistant\n") and task.stop == ()
    ids = encode(tokenizer, item.prompt)
    assert ids.count(0) == 6 and tokenizer.decode(ids) == item.prompt
    tokenizer.backend_tokenizer.post_processor = _starts_with_special_token()
    assert tokenizer(item.prompt)["input_ids"][:2] == [0, 0] and encode(tokenizer, item.prompt) == ids
    assert encode(tokenizer, "a")[0] == 0 and len(encode(tokenizer, "a")) == 2
    with pytest.raises(ConfigError, match="no chat template"):
        task.items(1, 0, make_tokenizer(None))


def test_grading_ends_at_the_next_question(tmp_path: Path) -> None:
    task = Answers(tmp_path / "sums.jsonl")
    item = Item("sums-0", "", ("1,018",))
    assert task.grade(item, " 9 + 9 = 1018.\n#### 1018\n\nQuestion: What is 3 + 4?\nAnswer: 7\n#### 7")
    assert task.grade(item, " That makes 1,018.00 apples.\nQuestion: And 5?")
    assert not task.grade(item, " 1,018 - 1 = 1,017")
    assert not task.grade(item, " many") and not task.grade(item, "")


def test_targets_are_written_as_integers_and_examples_may_come_from_another_file(tmp_path: Path) -> None:
    hard = [{"input": f"How many are {i}?", "target": i + 0.25 * (i % 2)} for i in range(40)]
    path = write(tmp_path / "hard.jsonl", hard)
    other = write(tmp_path / "sums.jsonl", problems(3))
    task = Answers(path, shots=3, examples=other)
    items = task.items(8, 0, make_tokenizer())
    for item in items:
        i = int(item.id.removeprefix("hard-"))
        assert item.answers == (str(i + 0.25) if i % 2 else str(i),)
        assert item.prompt.count("What is") == 3 and item.prompt.count("How many") == 1
        assert task.grade(item, f" #### {i + 0.25 * (i % 2):.2f}") and not task.grade(item, f" #### {i + 1}")
    own = Answers(path, shots=1).items(1, 0, make_tokenizer())[0]
    assert "\nAnswer: #### " in own.prompt


def test_errors_name_the_value(tmp_path: Path) -> None:
    tokenizer, path = make_tokenizer(), write(tmp_path / "sums.jsonl", problems(RESERVED + 5))
    with pytest.raises(ConfigError, match="shots is 33"):
        Answers(path, shots=33).items(1, 0, tokenizer)
    with pytest.raises(ConfigError, match="n is 0"):
        Answers(path).items(0, 0, tokenizer)
    with pytest.raises(DataError, match=r"6 items are wanted, but .* 5"):
        Answers(path).items(6, 0, tokenizer)
    with pytest.raises(DataError, match="fewer than shots=4"):
        Answers(path, examples=write(tmp_path / "few.jsonl", problems(3))).items(1, 0, tokenizer)
    with pytest.raises(DataError, match="problem 0 has no number"):
        Answers(write(tmp_path / "words.jsonl", [{"question": "?", "answer": "no"}])).items(1, 0, tokenizer)
    with pytest.raises(DataError, match="line 1 has not the fields question, answer or input, target"):
        Answers(write(tmp_path / "names.jsonl", [{"question": "?"}])).items(1, 0, tokenizer)
    (tmp_path / "text.jsonl").write_text('{"question": "?", "answer": "1"}\n\noops\n')
    with pytest.raises(DataError, match="line 3 is not JSON"):
        Answers(tmp_path / "text.jsonl").items(1, 0, tokenizer)
    with pytest.raises(DataError, match="cannot read"):
        Answers(tmp_path / "none.jsonl").items(1, 0, tokenizer)


def _starts_with_special_token() -> Any:
    from tokenizers.processors import TemplateProcessing

    return TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
