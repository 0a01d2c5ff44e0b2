"""Collect the JSON files of several ``lamina fidelity`` runs in one CSV.

    lamina calibrate MODEL --data gsm8k_train.jsonl --data default -o gsm.profile
    lamina fidelity --model MODEL --profile gsm.profile --arms oscar-int2,lamina-int2,... --text gsm8k_test.jsonl \
        --seq-len 2048 --max-tokens 8192 --position-offset 30% --json gsm-gsm8k-30%.json
    python benchmarks/fidelity_csv.py *.json --csv benchmarks/results/fidelity_smollm2.csv

A file's name says profile, text and position offset, separated by dashes.
"""

import argparse
import json
from pathlib import Path

from report import write_csv

FIELDS = ("name", "bits_history", "bits_at_context", "kl_mean", "kl_median", "kl_p99", "top1", "ppl", "simulated")


def rows(path: Path) -> list[dict[str, object]]:
    """One row an arm."""
    profile, text, offset, *_ = path.stem.split("-")
    document = json.loads(path.read_text())
    where = {"calibration": profile, "text": text, "offset": offset, "tokens": document["tokens"]}
    return [where | {f: round(a[f], 6) if isinstance(a[f], float) else a[f] for f in FIELDS} for a in document["arms"]]


def main() -> None:
    """Collect."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--csv", type=Path, required=True)
    args = parser.parse_args()
    table = [row for path in sorted(args.files) for row in rows(path)]
    write_csv(table, args.csv)


if __name__ == "__main__":
    main()
