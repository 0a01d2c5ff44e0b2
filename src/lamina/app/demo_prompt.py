"""The demo's own prompt: source text that every Python carries, and a question about it."""

import importlib.abc
import importlib.util
from collections.abc import Callable

from lamina.errors import DataError

MIN_TOKENS = 1500
# None of these is part of the default calibration text.
MODULES = ("secrets", "getpass", "linecache", "codeop", "rlcompleter", "filecmp", "tabnanny", "symtable", "glob")
QUESTION = "What do these modules do, and when would I use them?"


def built_in_prompt(count_tokens: Callable[[str], int], min_tokens: int = MIN_TOKENS) -> str:
    """Whole modules, as many as it takes to reach ``min_tokens``, and a question about them.

    Raises
    ------
    DataError
        This Python carries no source text.
    """
    parts: list[str] = []
    for name in MODULES:
        source = _source(name)
        if source:
            parts.append(f"# {name}.py\n{source}")
            prompt = "\n".join(parts) + "\n\n" + QUESTION
            if count_tokens(prompt) >= min_tokens:
                return prompt
    raise DataError(
        f"this Python carries too little source text for a prompt of {min_tokens} tokens; give one with --prompt-file"
    )


def _source(name: str) -> str:
    try:
        spec = importlib.util.find_spec(name)
        loader = spec.loader if spec else None
        return (loader.get_source(name) or "") if isinstance(loader, importlib.abc.InspectLoader) else ""
    except (ImportError, OSError):
        return ""
