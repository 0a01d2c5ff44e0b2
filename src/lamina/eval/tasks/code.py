"""Functions to complete, graded by tests that are run: files in the format of HumanEval.

Grading runs what a model wrote, with the limits and under the warning of :mod:`lamina.eval.tasks.sandbox`, which is no
security boundary.
"""

import io
import tokenize
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lamina.eval.tasks.base import Item, cut
from lamina.eval.tasks.records import draw, read_records, shuffled
from lamina.eval.tasks.sandbox import Limits, run_program

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FIELDS = (("task_id", "prompt", "entry_point", "test"),)
_BLANK = frozenset({tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT})


@dataclass(frozen=True)
class HumanEval:
    """Problems of a file.

    Attributes
    ----------
    path : Path
        ``.jsonl`` or ``.jsonl.gz`` with the fields ``task_id``, ``prompt``, ``entry_point`` and ``test``.
    limits : Limits
        What a completed program may use.
    max_new_tokens : int
        Tokens after which a completion is cut off.
    """

    path: Path
    limits: Limits = field(default_factory=Limits)
    max_new_tokens: int = 384

    @property
    def name(self) -> str:
        """That of the file, without its suffixes."""
        return self.path.name.split(".")[0]

    @property
    def stop(self) -> tuple[str, ...]:
        """Beginnings of lines after a function; :func:`function_end` finds all others."""
        return ("\ndef ", "\nclass ", "\nif ", "\nprint(", "\nassert ", "\n```")

    def items(self, n: int, seed: int, tokenizer: "PreTrainedTokenizerBase") -> list[Item]:
        """See :class:`lamina.eval.tasks.base.Task`; the prompt is that of the file whatever the tokenizer.

        Raises
        ------
        ConfigError
            ``n`` or ``seed`` is out of range.
        DataError
            The file cannot be read, or holds too few problems.
        """
        return [
            Item(record["task_id"], record["prompt"], (f"{record['test']}\ncheck({record['entry_point']})\n",))
            for record in draw(shuffled(read_records(self.path, _FIELDS)), n, seed)
        ]

    def grade(self, item: Item, text: str) -> bool:
        """Whether the completed function passes all tests."""
        text = cut(text, self.stop)
        program = f"{item.prompt}{text[: function_end(item.prompt, text)]}\n{item.answers[0]}"
        return run_program(program, self.limits).passed


def function_end(prompt: str, completion: str) -> int:
    """Characters of ``completion`` before its first statement that is not indented.

    Lines that are not indented but belong to a string, a bracket or a comment do not count.
    """
    source = prompt + completion
    lines = source.split("\n")
    fresh = True
    try:
        for token in tokenize.generate_tokens(io.StringIO(source, newline="\n").readline):
            row, column = token.start
            if fresh and column == 0 and token.type not in _BLANK:
                at = sum(len(line) + 1 for line in lines[: row - 1]) - len(prompt)
                if at >= 0:
                    return min(at, len(completion))
            fresh = token.type == tokenize.NEWLINE or (fresh and token.type in _BLANK)
    except (tokenize.TokenError, SyntaxError):
        # The text ends within a statement, or is no Python.
        pass
    return len(completion)
