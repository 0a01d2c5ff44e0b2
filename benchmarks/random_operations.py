"""How long does a cache's state stay right? Thousands of random operations against a float64 account of every row.

python benchmarks/random_operations.py --operations 10000 --seed 0
"""

import argparse
import sys
from pathlib import Path

from report import write_csv

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from operations import Driver


def main() -> None:
    """Run, print a summary and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", type=Path, default=Path(__file__).parent / "results" / "random_operations.csv")
    args = parser.parse_args()
    found = Driver(args.seed).run(args.operations, every=args.operations // 10)
    row = {
        "operations": args.operations,
        "seed": args.seed,
        "kinds": " ".join(f"{name.replace(' ', '-')}:{n}" for name, n in found.operations.most_common()),
        "outputs_compared": found.outputs,
        "pages_checked": found.pages,
        "attention_error": f"{found.attention_error:.2e}",
        **{f"code_error_{bits}": f"{x:.2e}" for bits, x in found.code_error.items()},
        "bytes_start": found.bytes_start,
        "bytes_peak": found.bytes_peak,
        "bytes_end": found.bytes_end,
        "seconds": f"{found.seconds:.0f}",
    }
    for name, value in row.items():
        print(f"{name:18s} {value}")
    write_csv([row], args.csv)


if __name__ == "__main__":
    main()
