"""Which documents a command calibrates on and which it measures on, and how several sources are mixed."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lamina.basis.text import DEFAULT_SOURCE, load_documents, token_sequences
from lamina.errors import ConfigError, DataError

HELD_OUT_EVERY = 8


@dataclass(frozen=True)
class Source:
    """A named list of documents."""

    name: str
    documents: list[str]


def split(source: Source) -> tuple[Source, Source]:
    """Split a source into what is calibrated on and what is held out: every eighth document, at least one."""
    documents = source.documents
    if len(documents) < 2:
        raise DataError(f"{source.name} holds one document, which cannot be both calibrated and measured on; give more")
    held = set(range(HELD_OUT_EVERY - 1, len(documents), HELD_OUT_EVERY)) or {len(documents) - 1}
    kept = [document for i, document in enumerate(documents) if i not in held]
    return Source(source.name, kept), Source(source.name, [documents[i] for i in sorted(held)])


def read_sources(names: Sequence[str], field: str | None = None) -> list[Source]:
    """Read the documents of several sources; ConfigError if one is named twice."""
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise ConfigError(f"--data {', '.join(sorted(repeated))} is given more than once; name each source once")
    return [Source(name, load_documents(name, field=field)) for name in names]


def calibration_sources(names: Sequence[str], field: str | None = None) -> list[Source]:
    """Read sources to calibrate on; every eighth document of the default text stays out, for measuring."""
    return [split(source)[0] if source.name == DEFAULT_SOURCE else source for source in read_sources(names, field)]


def evaluation_source(name: str, field: str | None = None) -> Source:
    """Read a source to measure on; of the default text, the documents that calibration leaves out."""
    (source,) = read_sources([name], field)
    return split(source)[1] if name == DEFAULT_SOURCE else source


def mixed_sequences(
    sources: Sequence[Source], tokenizer: PreTrainedTokenizerBase, *, seq_len: int, tokens: int, seed: int
) -> Iterator[Tensor]:
    """Sequences of all sources in turn, each shuffled by ``seed``, until there are ``tokens`` or no text is left.

    Yields
    ------
    Tensor
        int64 ``[1, seq_len]``; as many as it takes to reach ``tokens``.
    """
    count = -(-tokens // seq_len)
    limit = count * seq_len
    streams = deque(
        (s.name, token_sequences(s.documents, tokenizer, seq_len=seq_len, max_tokens=limit, seed=seed)) for s in sources
    )
    while streams and count:
        name, stream = streams.popleft()
        try:
            sequence = next(stream, None)
        except DataError as error:
            raise DataError(f"{name}: {error}") from error
        if sequence is not None:
            streams.append((name, stream))
            count -= 1
            yield sequence
