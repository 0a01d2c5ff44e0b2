"""Values as they are written on a command line: bytes, tiers and positions."""

import re

from lamina.codec.page import check_tier
from lamina.errors import ConfigError

_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(ib|b)?", re.IGNORECASE)
_TIER = re.compile(r"k(\d+)v(\d+)|(\d+)", re.IGNORECASE)
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_PREFIXES = ["", "k", "m", "g", "t"]


def parse_bytes(text: str, option: str) -> int:
    """Bytes of ``512M``, ``24G``, ``1.5GiB`` (powers of 1024), ``24GB`` (powers of 1000) or a plain number.

    Raises
    ------
    ConfigError
        Naming ``option``, if the text is none of these or is not positive.
    """
    match = _BYTES.fullmatch(text.strip())
    found = 0
    if match and not (match[2] == "" and (match[3] or "").lower() == "ib"):
        base = 1000 if match[2] and (match[3] or "").lower() == "b" else 1024
        found = int(float(match[1]) * base ** _PREFIXES.index(match[2].lower()))
    if found < 1:
        raise ConfigError(f"{option} is {text!r}; write a number of bytes such as 24G, 512M or 1000000000")
    return found


def format_bytes(n_bytes: float) -> str:
    """Bytes in KiB, MiB or GiB with three digits."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(n_bytes) >= size:
            value = n_bytes / size
            return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"
    return f"{n_bytes:,.0f} B"


def parse_tier(text: str) -> tuple[int, int]:
    """Bits of K and V from ``2``, ``4``, ``8``, or a pair such as ``k4v2``; ConfigError for anything else."""
    match = _TIER.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"the tier {text!r} is neither 2, 4 or 8 nor a pair such as k4v2")
    k, v = (int(match[3]), int(match[3])) if match[3] else (int(match[1]), int(match[2]))
    return check_tier(k, f"the K tier of {text!r}"), check_tier(v, f"the V tier of {text!r}")


def tier_name(tier: tuple[int, int]) -> str:
    """``2`` for (2, 2), ``k4v2`` for (4, 2)."""
    k, v = tier
    return str(k) if k == v else f"k{k}v{v}"


def parse_position(text: str, max_positions: int) -> int:
    """Position from a number, or from a percentage of the model's maximum such as ``30%``; ConfigError otherwise."""
    match = _PERCENT.fullmatch(text.strip())
    if match and float(match[1]) <= 100:
        return int(max_positions * float(match[1]) / 100)
    if match or not text.strip().isdecimal():
        raise ConfigError(f"the position offset {text!r} is neither a number of tokens nor a percentage up to 100%")
    return int(text)
