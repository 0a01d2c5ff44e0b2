"""All arms at larger sizes on one GPU: figures and timings of a protocol in one CSV.

    python benchmarks/evaluate_gpu.py --folder gpu --csv benchmarks/results/evaluate_gpu.csv
    python benchmarks/evaluate_gpu.py --model MODEL --profile tuned.profile --folder gpu --csv evaluate_gpu.csv

Without a model, one of a real shape with random weights is made, with a tokenizer of bytes, calibrated on the default
text and tuned on what calibration leaves out of it, which the fidelity is measured on too; nothing is fetched. Such a
model answers nothing right: its rows say what the arms take in time and bytes, and how far they are from exact
attention, not what they cost in accuracy. A run that was stopped goes on in its folder.
"""

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from report import write_csv
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lamina.app.calibrate import CalibrationRequest, run_calibration
from lamina.app.protocol_file import ProtocolRequest, run_protocol
from lamina.app.screen import Screen
from lamina.app.tune import TuneRequest, run_tuning
from lamina.eval.log import read_log
from lamina.eval.summary import summarise

SHAPES: dict[str, dict[str, int]] = {
    "llama-3.1-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128,
    },
    "llama-3.2-1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64,
    },
    "tiny": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16,
    },
}  # fmt: skip
POSITIONS = 131_072
SPECIALS = ["<s>", "</s>"]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(SPECIALS + alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>")


def make_model(shape: str, folder: Path, device: str) -> Path:
    """Random weights in bfloat16 and a tokenizer, as a model folder."""
    path = folder / shape
    if not (path / "tokenizer.json").exists():
        torch.manual_seed(0)
        with torch.device(device):
            torch.set_default_dtype(torch.bfloat16)
            model = LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=len(SPECIALS) + 256, max_position_embeddings=POSITIONS, rope_theta=500_000.0,
                    bos_token_id=0, eos_token_id=1, pad_token_id=1, **SHAPES[shape],
                )
            )  # fmt: skip
            torch.set_default_dtype(torch.float32)
        model.save_pretrained(path)
        byte_tokenizer().save_pretrained(path)
    return path


def make_profile(model: Path, folder: Path, tokens: int, device: str) -> Path:
    """Calibrated, and tuned to 3 bits, on the default text."""
    plain, tuned = folder / "plain.profile", folder / "tuned.profile"
    screen = Screen()
    if not plain.exists():
        run_calibration(CalibrationRequest(str(model), plain, ["default"], tokens=tokens, device=device), screen)
    if not tuned.exists():
        request = TuneRequest(
            str(model), plain, tuned, target_bits=3.0, tokens=768, seq_len=768, device=device
        )  # fmt: skip
        run_tuning(request, screen)
    return tuned


def rows(results: Path) -> list[dict[str, Any]]:
    """A row an arm of every part."""
    found: list[dict[str, Any]] = []
    empty = dict.fromkeys(("kl_mean", "top1", "right", "n", "answer_s", "tokens_per_s"), "")
    for file in sorted(results.glob("*.json")):
        document = json.loads(file.read_text())
        for a in document["arms"]:
            figures = {"kl_mean": f"{a['kl_mean']:.3g}", "top1": f"{a['top1']:.4f}", "kv_bytes": a["kv_bytes"]}
            found.append(
                _row(file.stem, document["tokens"], a, a["bits_history"], a["bits_at_context"]) | empty | figures
            )
    for log_file in sorted(results.glob("*/answers.jsonl")):
        log = read_log(log_file)
        seconds, speeds, n_bytes = defaultdict(list), defaultdict(list), defaultdict(list)
        for r in log.of(kind="answer"):
            seconds[r["arm"]].append(r["seconds"])
            speeds[r["arm"]].append(r["tokens"] / r["seconds"])
            n_bytes[r["arm"]].append(r["kv_bytes"])
        for s in summarise(log):
            figures = {
                "right": f"{s.accuracy.mean:.3f}", "n": s.n, "answer_s": f"{statistics.median(seconds[s.arm]):.3f}",
                "tokens_per_s": f"{statistics.median(speeds[s.arm]):.2f}",
                "kv_bytes": round(statistics.mean(n_bytes[s.arm])),
            }  # fmt: skip
            named = {"name": s.arm, "simulated": s.simulated}
            tokens = max(r["prompt_tokens"] for r in log.of(kind="answer"))
            found.append(_row(log_file.parent.name, tokens, named, s.bits, s.bits_at_context) | empty | figures)
    return found


def _row(part: str, tokens: int, arm: dict[str, Any], bits: float | None, context: float | None) -> dict[str, Any]:
    shown = ["" if x is None or x != x else f"{x:.3f}" for x in (bits, context)]
    return {
        "part": part, "tokens": tokens, "arm": arm["name"], "simulated": arm["simulated"], "bits": shown[0],
        "bits_at_context": shown[1], "kv_bytes": "",
    }  # fmt: skip


def main() -> None:
    """Make what is missing, run the protocol, and collect."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--protocol", type=Path, default=Path(__file__).parent / "protocols" / "gpu.toml")
    parser.add_argument("--tokens", type=int, default=32_768, help="to calibrate on")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    model = args.model or str(make_model(args.shape, args.folder, args.device))
    profile = args.profile or make_profile(Path(model), args.folder, args.tokens, args.device)
    run_protocol(ProtocolRequest(args.protocol, model, profile, args.folder / "results", device=args.device), Screen())
    found = [{"model": args.model or f"{args.shape}, random weights", **row} for row in rows(args.folder / "results")]
    write_csv(found, args.csv)


if __name__ == "__main__":
    main()
