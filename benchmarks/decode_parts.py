"""What does decode attention spend its time on: loads, products, the rest?

    python benchmarks/decode_parts.py --csv benchmarks/results/decode_parts.csv

The kernel as it is, and with parts taken out of its source, which gives wrong results but tells their time: ``loads``
leaves the copies of pages into shared memory alone, ``no loads`` all but those, ``no loads, no products`` takes the
matrix products out as well.
"""

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from decode_attention import Case, copy_gbps, lamina_ms
from report import write_csv

from lamina.attention.cuda import decode, nvrtc


def replaced(source: str, pattern: str, by: str) -> str:
    """The source with what must be there replaced."""
    changed, n = re.subn(pattern, lambda _: by, source, flags=re.S)
    if not n:
        raise SystemExit(f"decode.cu has changed: there is nothing like {pattern!r} in it")
    return changed


def loads_alone(source: str) -> str:
    """Every slab is waited for, and none is read."""
    every = "".join(f"if constexpr (ALL > {i}) arrived(Int<{i}>());" for i in range(8))
    return replaced(source, r"const u8\* here = arrived\(Int<0>\(\)\);.*?base \+= ALL;", every + "base += ALL;")


def no_loads(source: str) -> str:
    """Shared memory holds whatever it held."""
    return replaced(source, r'asm volatile\("cp\.async\.ca[^;]*;"[^;]*;', "")


def no_products(source: str) -> str:
    """One addition in place of a product."""
    return replaced(no_loads(source), r'asm\("mma\.sync.*?"r"\(b1\)\); \\', "c[0] += a0 + a1 + a2 + a3 + b0 + b1; \\")


PARTS: dict[str, Callable[[str], str]] = {
    "all": lambda source: source, "loads": loads_alone, "no loads": no_loads, "no loads, no products": no_products,
}  # fmt: skip


def main() -> None:
    """Time the parts at each tier and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=Path, required=True)
    args = parser.parse_args()
    compile_source, table = nvrtc._compile, []
    for bits in (2, 4, 8):
        row: dict[str, Any] = {"batch": 8, "context": 32768, "tier": bits}
        for name, change in PARTS.items():
            nvrtc._compile = lambda source, options, change=change: compile_source(change(source), options)
            decode._module.cache_clear()
            ms, n_bytes = lamina_ms(Case(8, 32768, mix=((bits, 1.0),)))
            row[f"{name} us"] = f"{1e3 * ms:.1f}"
            row["packed_gbps"] = row.get("packed_gbps") or f"{n_bytes / ms / 1e6:.0f}"
            torch.cuda.empty_cache()
        row["copy_gbps"] = f"{copy_gbps(n_bytes):.0f}"
        table.append(row)
        print(row, flush=True)
    write_csv(table, args.csv)


if __name__ == "__main__":
    main()
