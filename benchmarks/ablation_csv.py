"""Studies and stages of a real model as CSV files.

    lamina ablate --model MODEL --profile gsm.profile --text gsm8k_test.jsonl --other-profile gsm-4096.profile \
        --json > ablation.json
    lamina stages --model MODEL --profile gsm.profile --text gsm8k_test.jsonl --arms oscar-int2,lamina-int2,... \
        --json > stages.json
    python benchmarks/ablation_csv.py ablation.json --csv benchmarks/results/ablation.csv
    python benchmarks/ablation_csv.py stages.json --csv benchmarks/results/stages.csv

Run all of them with as many threads: the CSV tells those of the last command.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from report import write_csv

Rows = list[dict[str, Any]]


def studies(document: dict[str, Any]) -> Rows:
    """One row an arm of a study."""
    return [
        {"study": study["study"], "against": study["against"]} | arm for study in document["studies"]
        for arm in study["arms"]
    ]  # fmt: skip


def stages(document: dict[str, Any]) -> Rows:
    """One row a layer of an arm, and one for their average."""
    return [
        {"arm": arm["arm"], "simulated": arm["simulated"]} | layer for arm in document["arms"]
        for layer in [*arm["layers"], {"layer": "mean"} | arm["mean"]]
    ]  # fmt: skip


def main() -> None:
    """Convert one document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--csv", type=Path, required=True)
    args = parser.parse_args()
    document = json.loads(args.file.read_text())
    where = {name: document[name] for name in ("tokens", "seq_len", "sink", "recent")}
    where = {name: Path(document[name]).name for name in ("model", "profile", "text")} | where
    rows = studies(document) if "studies" in document else stages(document)
    rounded = [{n: f"{x:.6g}" if isinstance(x, float) else x for n, x in row.items()} | where for row in rows]
    write_csv(rounded, args.csv)


if __name__ == "__main__":
    main()
