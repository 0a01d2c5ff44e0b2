"""What a task is: items with a prompt that a model continues, and a rule that says whether the text is right."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from lamina.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Item:
    """One prompt and what its continuation is graded by.

    Attributes
    ----------
    id : str
        Unique within a task.
    prompt : str
        Text to continue; :func:`encode` makes its tokens.
    answers : tuple of str
        What :meth:`Task.grade` looks for: strings that must all be named, a number, or the tests of a function.
    wrong : tuple of str
        What must not be named; every distractor is among them.
    """

    id: str
    prompt: str
    answers: tuple[str, ...]
    wrong: tuple[str, ...] = ()


class Task(Protocol):
    """Items to be continued greedily, and their grading."""

    @property
    def name(self) -> str:
        """What results call it."""

    @property
    def max_new_tokens(self) -> int:
        """Tokens after which a continuation is cut off."""

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings at the first of which a continuation ends; it need not be generated further."""

    def items(self, n: int, seed: int, tokenizer: "PreTrainedTokenizerBase") -> list[Item]:
        """``n`` items, the same for the same arguments, and others for another seed."""

    def grade(self, item: Item, text: str) -> bool:
        """Whether the continuation ``text``, without the prompt, is right."""


def encode(tokenizer: "PreTrainedTokenizerBase", prompt: str) -> list[int]:
    """Tokens of a prompt, which begins with only one special token where a chat template wrote it already."""
    ids: list[int] = tokenizer(prompt, verbose=False)["input_ids"]
    return ids[1:] if ids[:2] == [tokenizer.bos_token_id] * 2 else ids


def render(
    tokenizer: "PreTrainedTokenizerBase",
    *,
    context: str,
    question: str,
    chat: bool,
    examples: Sequence[tuple[str, str]] = (),
    lead: str = "",
) -> str:
    """Write a prompt as plain text, or as a conversation.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
        Its chat template is used where ``chat`` is set.
    context : str
        What comes before the first question.
    question : str
        The question to answer.
    chat : bool
        A conversation instead of lines that begin with ``Question:`` and ``Answer:``.
    examples : sequence of (str, str)
        Questions and answers that come before.
    lead : str
        First words of the answer.

    Raises
    ------
    ConfigError
        ``chat`` is set and the tokenizer has no chat template.
    """
    if not chat:
        turns = [f"Question: {q}\nAnswer: {a}" for q, a in (*examples, (question, lead))]
        return "\n\n".join([context, *turns]).rstrip()
    if not tokenizer.chat_template:
        raise ConfigError("chat is True, but the tokenizer has no chat template. Set chat=False for plain text.")
    asked = [q for q, _ in examples] + [question]
    asked[0] = f"{context}\n\n{asked[0]}"
    messages = [{"role": "user", "content": asked[0]}]
    for (_, answer), following in zip(examples, asked[1:], strict=True):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": following}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)) + lead


def cut(text: str, stop: Sequence[str]) -> str:
    """``text`` up to the first of the strings ``stop``."""
    return text[: min((at for s in stop if (at := text.find(s)) >= 0), default=len(text))]
