"""Word problems whose answer is a number: files in the format of GSM8K and of GSM-Hard."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamina.errors import ConfigError, DataError
from lamina.eval.tasks.base import Item, cut, render
from lamina.eval.tasks.records import draw, read_records, shuffled

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RESERVED = 32
"""Records that examples are taken from, and items never."""

_FIELDS = (("question", "answer"), ("input", "target"))
_CONTEXT = "Solve the problem step by step. Write the final number after '####'."
_MARK = re.compile(r"####|\\boxed\{")
_CALCULATION = re.compile(r"<<[^>]*>>")
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
_PLAIN = r"(?:\d{1,3}(?:,\d{3})+(?!,?\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
    rf"""
    (?<![\w.^])(?<!\^\{{)                                         # not within a word, a number or an exponent
    (?:(?<![)\]])(?P<sign>[-−]))?                               # a minus, but no difference
    (?:[$€£](?P<late>[-−])?)?                                   # $5, -$5, $-5
    (?P<value>{_PLAIN})
    (?:
      \s?/\s?(?P<below>0*[1-9]\d*)(?!\.\d)                      # 3/4
      | [ ](?P<over>\d+)/(?P<under>0*[1-9]\d*)                  # 2 1/2
      | [eE](?P<exponent>[+-]?\d{{1,3}})(?!\w)                  # 1.5e6
      | \s?(?:[x×*·]|\\times|\\cdot)\s?10\^\{{?(?P<power>[+-]?\d{{1,3}})\}}?   # 1.5 x 10^6
    )?
    """,
    re.VERBOSE,
)


@dataclass(frozen=True)
class Answers:
    """Problems of a file.

    Attributes
    ----------
    path : Path
        ``.jsonl`` or ``.jsonl.gz`` with the fields ``question`` and ``answer`` (which ends with ``#### 42``), or
        ``input`` and ``target``.
    shots : int
        Solved examples before each problem, the same before all, at most :data:`RESERVED`.
    examples : Path, optional
        File of the examples; a part of ``path`` that items are never taken from, unless told. Examples from
        ``target`` fields show no steps, so name a file with ``answer`` fields for these.
    chat : bool
        Ask in the tokenizer's chat template.
    max_new_tokens : int
        Tokens after which an answer is cut off.
    """

    path: Path
    shots: int = 4
    examples: Path | None = None
    chat: bool = False
    max_new_tokens: int = 320

    @property
    def name(self) -> str:
        """That of the file, without its suffixes."""
        return self.path.name.split(".")[0]

    @property
    def stop(self) -> tuple[str, ...]:
        """The next question, which a model that was not asked in a conversation may make up."""
        return () if self.chat else ("\nQuestion:",)

    def items(self, n: int, seed: int, tokenizer: "PreTrainedTokenizerBase") -> list[Item]:
        """See :class:`lamina.eval.tasks.base.Task`; :func:`lamina.eval.tasks.records.draw` says which.

        Raises
        ------
        ConfigError
            ``shots``, ``n`` or ``seed`` is out of range, or ``chat`` finds no template.
        DataError
            A file cannot be read, or holds too few problems.
        """
        if not 0 <= self.shots <= RESERVED:
            raise ConfigError(f"shots is {self.shots}; ask for 0 to {RESERVED} examples.")
        order = shuffled(self._problems(self.path))
        pool = order if self.examples is None else shuffled(self._problems(self.examples))
        if len(pool) < self.shots:
            raise DataError(f"{self.examples or self.path} has {len(pool)} problems, fewer than shots={self.shots}.")
        examples = [(question, _shown(answer)) for _, question, answer in pool[: self.shots]]
        return [
            Item(
                f"{self.name}-{line}",
                render(tokenizer, context=_CONTEXT, question=question, chat=self.chat, examples=examples),
                (_final(answer),),
            )
            for line, question, answer in draw(order[RESERVED:], n, seed)
        ]

    def grade(self, item: Item, text: str) -> bool:
        """Whether the final number is close to the target."""
        value, target = final_number(cut(text, self.stop)), final_number(item.answers[0])
        return value is not None and target is not None and close(value, target)

    def _problems(self, path: Path) -> list[tuple[int, str, str]]:
        """Numbers, questions and answers."""
        problems = []
        for number, record in enumerate(read_records(path, _FIELDS)):
            answer = str(record["answer"]) if "answer" in record else f"#### {_written(record['target'])}"
            question = str(record.get("question", record.get("input"))).strip()
            if final_number(answer) is None:
                raise DataError(f"{path}: the answer of problem {number} has no number: {answer!r}.")
            problems.append((number, question, answer))
        return problems


def final_number(text: str) -> float | None:
    r"""The first number after ``####`` or ``\boxed{``, or the last of all; None if there is none.

    Understood are thousands separators, decimals, signs, currency before and units after a number, fractions,
    mixed numbers, and powers of ten. A digit that a letter or ``^`` precedes belongs to a unit or a name.
    """
    text = _LATEX_FRACTION.sub(r"\1/\2", text.replace("{,}", ",").replace("\\$", "$").replace("**", " "))
    mark = _MARK.search(text)
    first = _NUMBER.search(text, mark.end()) if mark else None
    found = [first] if first else [*_NUMBER.finditer(text)]
    return _value(found[-1]) if found else None


def close(value: float, target: float) -> bool:
    """Whether a number is the target: an integer exactly, another to half a hundredth, or half a percent below 1."""
    tolerance = 0.0 if target == round(target) else 0.005 * min(1.0, abs(target))
    return math.isclose(value, target, rel_tol=1e-14, abs_tol=tolerance)


def _value(found: re.Match[str]) -> float:
    part = found.groupdict()
    value = float(part["value"].replace(",", ""))
    if part["below"]:
        value /= float(part["below"])
    elif part["under"]:
        value += float(part["over"]) / float(part["under"])
    elif exponent := part["exponent"] or part["power"]:
        value = float(f"{part['value'].replace(',', '')}e{exponent}")
    return -value if part["sign"] or part["late"] else value


def _shown(answer: str) -> str:
    """A solution without the calculator's notes."""
    return _CALCULATION.sub("", answer).strip()


def _final(answer: str) -> str:
    """What follows the mark."""
    return answer.rpartition("####")[2].strip()


def _written(target: Any) -> str:
    """A target as one would write it: no ``.0`` after an integer."""
    number = isinstance(target, float) and math.isfinite(target) and target == round(target)
    return str(round(target)) if number else str(target)
