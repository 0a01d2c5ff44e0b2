"""How fast does vLLM serve with Lamina, against its own 16-bit and FP8 caches, and how many tokens fit?

    python benchmarks/serve_vllm.py --shape qwen3-8b --load 1x8192 32x8192 maxx32768 --tiers 2 4 --csv serve_vllm.csv
    python benchmarks/serve_vllm.py MODEL --profile P --load 8x8192 --prefix-hits 0 0.5 0.9 --csv serve_vllm.csv

One engine after the other in this process, with weights drawn anew from N(0, 0.02) and the same random prompts in the
same order. All requests of a load come at once; ``maxx32768``: as many as the cache holds. A pass lasts until
``--new-tokens`` steps have been timed in which all of them decode. Steps that prefill later prompts decode the earlier
ones too, which ``prefill_tokens_s`` (all prompts, until the last one's first token) includes. With ``--prefix-hits``
the prefix cache is on, requests share the first part of their prompts, which an earlier request left behind, and a pass
lasts until all are answered. Rows are appended to the CSV as they come; what an arm says of itself, to a
``.jsonl`` beside it. With ``--filled`` prompts are not computed, see ``filled_cache.py``: for decoding alone.
"""

import argparse
import csv
import gc
import itertools
import json
import math
import os
import statistics
import tempfile
import time
import traceback
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

BEGAN = time.perf_counter()
SHOWN = ("ttft_mean_s", "ttft_last_s", "prefill_tokens_s", "step_ms_mean", "step_ms_median", "output_tokens_s")
COLUMNS = (
    "date", "commit", "machine", "vllm", "torch", "arm", "tiers", "shape", "layers", "tensor_parallel", "batch",
    "prompt_tokens", "new_tokens", "repeat", "prefix_hit", *SHOWN, "kv_tokens", "gpu_gb", "requests_s",
    "cached_tokens", "preempted", "load", "settings",
)  # fmt: skip
ARMS: dict[str, dict[str, Any]] = {
    "bf16": {"attention_backend": "FLASH_ATTN"},
    "fp8": {"attention_backend": "FLASH_ATTN", "kv_cache_dtype": "fp8"},
    "lamina": {"attention_backend": "CUSTOM", "block_size": 64},
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "hidden_size": 4096,
        "intermediate_size": 12288, "max_position_embeddings": 131072, "num_attention_heads": 32,
        "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_scaling": None,
        "rope_theta": 1000000, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 151936,
    },
}  # fmt: skip
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0",
}  # fmt: skip
STATS = {"bits_history", "planes_shed", "exact_used", "exact_pages", "arena_used", "arena_slots", "non_finite"}
GREEDY = (5, 100, 1000, 3000)  # tokens of the prompts that every arm answers
SETTLE = 2  # steps after the last first token that are not timed
PAGE = 64  # shared prefixes are whole blocks of every arm

Row = dict[str, Any]


class Load(NamedTuple):
    """Requests that come at once; ``batch`` 0 for as many as fit."""

    name: str
    batch: int
    tokens: int


def parse_load(text: str) -> Load:
    """Load from ``8x8192`` or ``maxx8192``."""
    batch, tokens = text.rsplit("x", 1)
    return Load(text, 0 if batch == "max" else int(batch), int(tokens))


def refill_weights(worker: Any) -> None:
    """Draw a worker's dummy weights anew: they are too small to tell anything of attention."""
    model = worker.get_model()
    generator = torch.Generator(next(model.parameters()).device).manual_seed(7)
    for name, p in model.named_parameters():
        if "norm" in name:
            p.data.fill_(1.0)
        elif p.is_floating_point() and p.element_size() > 1:
            p.data.normal_(0, 0.02, generator=generator)


def hadamard_profile(config: Any, path: Path) -> Path:
    """Write a profile that needs no data; its bases are stored and multiplied with like any others."""
    from lamina import Profile
    from lamina.basis.geometry import model_geometry
    from lamina.basis.profile import LayerProfile
    from lamina.basis.transforms import make_transform

    geometry = model_geometry(config)
    layers: list[LayerProfile | None] = [None] * geometry.n_layers
    for i, layer in geometry.packed.items():
        heads = layer.n_kv_heads
        transform = make_transform("hadamard", n_heads=heads, head_dim=layer.head_dim).float()
        layers[i] = LayerProfile(transform, torch.full((heads, 3, 3), 0.1), torch.ones(heads), torch.ones(heads))
    Profile(layers, "hadamard", geometry.config_hash, "hadamard", [(2, 2)] * geometry.n_layers).save(path)
    return path


def extra_tokens(args: argparse.Namespace, batch: int, length: int) -> int:
    """Tokens a request may generate: those timed, and those while later prompts are prefilled."""
    if args.filled:
        length = PAGE
    steps = 0 if args.prefix_hits else 16 + math.ceil(1.25 * batch * length / max(1, args.batched_tokens - batch))
    return int(args.new_tokens + steps)


def engine_options(args: argparse.Namespace, arm: str, positions: int) -> Row:
    """What an arm's engine is started with; graphs are captured of the batches that occur."""
    most = args.max_num_seqs
    longest = max(x.tokens + extra_tokens(args, x.batch or most, x.tokens) for x in args.load)
    options = {
        "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", "seed": 0, "max_num_seqs": most,
        "tensor_parallel_size": args.tensor_parallel, "gpu_memory_utilization": args.utilization,
        "max_model_len": args.max_model_len or min(positions, max(3072, longest)), "enforce_eager": args.eager,
        "max_num_batched_tokens": args.batched_tokens,
        "enable_prefix_caching": args.prefix_hits is not None or args.filled,
    }  # fmt: skip
    if not args.eager:
        sizes = {2**i for i in range(most.bit_length())} | {most} | {x.batch or most for x in args.load}
        sizes |= set() if all(x.batch for x in args.load) else set(range(8, most, 8))
        compilation: Row = {"cudagraph_capture_sizes": sorted(s for s in sizes if s <= most)}
        compilation |= {} if args.compile == "default" else {"mode": int(args.compile)}
        compilation |= {} if args.cudagraph == "default" else {"cudagraph_mode": args.cudagraph}
        options["compilation_config"] = compilation
    return options | ARMS[arm]


class Engine:
    """One arm's engine, and what is measured of it."""

    def __init__(self, args: argparse.Namespace, arm: str, tiers: Any) -> None:
        self.args, self.arm, self.tiers = args, arm, tiers
        self.llm: Any = None
        self.warm: set[int] = set()
        self.stats: Row = {}

    def start(self, config: Any, model: Path, profile: Path | None) -> Row:
        """Start the engine and say what it is: seconds, tokens of capacity, GB, greedy answers."""
        from vllm import LLM, SamplingParams

        self.params = partial(SamplingParams, temperature=0, ignore_eos=True, detokenize=False)
        began, text = time.perf_counter(), config.get_text_config()
        options = engine_options(self.args, self.arm, text.max_position_embeddings)
        if self.arm == "lamina":
            settings = {"profile": str(profile), "tiers": self.tiers, **self.args.lamina}
            options["additional_config"] = {"lamina": settings}
        self.llm = LLM(model=str(model), **options)
        took = time.perf_counter() - began
        self.engine, self.core = self.llm.llm_engine, self.llm.llm_engine.engine_core.engine_core
        self.llm.collective_rpc(refill_weights)
        cache = self.engine.vllm_config.cache_config
        self.blocks, self.block_size = cache.num_gpu_blocks, cache.block_size
        self.max_len, self.vocab = options["max_model_len"], text.vocab_size
        prompts = [self._prompts(1, min(n, self.max_len - 16), 1)[0] for n in GREEDY]
        found = [o.outputs[0] for o in self._generate(prompts, 16, logprobs=1)]
        free, total = self.llm.collective_rpc(lambda _: torch.cuda.mem_get_info())[0]
        self.facts = {"kv_tokens": self.blocks * self.block_size, "gpu_gb": round((total - free) / 1e9, 1)}
        said = {"init_s": round(took, 1), "block_size": self.block_size, "max_model_len": self.max_len, **self.facts}
        said["logprobs"] = round(sum(o.cumulative_logprob for o in found), 4)
        if self.args.filled:
            from filled_cache import fill, find_everything

            self.llm.collective_rpc(fill)
            find_everything(self.llm)
        return said | {"greedy": [list(o.token_ids) for o in found]}

    def _generate(self, prompts: list[list[int]], tokens: int, **more: Any) -> list[Any]:
        given = [{"prompt_token_ids": p} for p in prompts]
        return list(self.llm.generate(given, self.params(max_tokens=tokens, **more), use_tqdm=False))

    def _prompts(self, n: int, tokens: int, seed: int) -> list[list[int]]:
        g = torch.Generator().manual_seed(seed)
        return [torch.randint(self.vocab, (tokens,), generator=g).tolist() for _ in range(n)]

    def batch_of(self, load: Load) -> int:
        """Requests of a load; 0 if it does not fit into the cache or the model's length."""
        most = self.args.max_num_seqs
        for batch in [load.batch] if load.batch else range(most, 0, -1):
            tokens = load.tokens + extra_tokens(self.args, batch, load.tokens)
            # One of vLLM's blocks holds nothing.
            if tokens <= self.max_len and batch <= most and batch * math.ceil(tokens / self.block_size) < self.blocks:
                return batch
        return 0

    def measure(self, load: Load, batch: int, hit: float | None, seed: int) -> Row:
        """One pass with fresh prompts."""
        from vllm.sampling_params import RequestOutputKind

        if load.tokens not in self.warm:
            self._generate(self._prompts(1, load.tokens, 2), 4)
            self.warm.add(load.tokens)
        shared = int((hit or 0) * load.tokens) // PAGE * PAGE
        prompts = self._prompts(batch, load.tokens - shared, seed)
        if shared:
            prefix = self._prompts(1, shared, seed + 500_000)[0]
            self._generate([[*prefix, 0]], 1)
            prompts = [prefix + p for p in prompts]
        more = extra_tokens(self.args, batch, load.tokens)
        params = self.params(max_tokens=more, output_kind=RequestOutputKind.DELTA)
        names = [f"{seed}-{i}" for i in range(batch)]
        try:
            began = time.perf_counter()
            for name, prompt in zip(names, prompts):
                self.engine.add_request(name, {"prompt_token_ids": prompt}, params)
            found = self._follow(began, batch, hit is None)
            return found | {"prefill_tokens_s": batch * load.tokens / found["ttft_last_s"]}
        finally:
            self.engine.abort_request(names)
            while self.core.scheduler.has_requests() or self.core.batch_queue:
                self.engine.step()

    def _follow(self, began: float, batch: int, timed: bool) -> Row:
        """Steps until enough of them are timed, or else until all requests are answered."""
        requests = list(self.core.scheduler.requests.values())
        first: dict[str, float] = {}
        marks: list[tuple[float, int]] = []
        tokens = cached = finished = 0
        while len(marks) <= SETTLE + self.args.new_tokens if timed else finished < batch:
            if not self.engine.has_unfinished_requests():
                raise RuntimeError("all requests ended before the measurement did")
            # Steps overlap: some calls put out nothing.
            outputs, now = self.engine.step(), time.perf_counter()
            for output in outputs:
                first.setdefault(output.request_id, now - began)
                tokens += len(output.outputs[0].token_ids)
                finished += output.finished
                cached += (output.num_cached_tokens or 0) * output.finished
            if outputs and len(first) == batch:
                marks.append((now, tokens))
        if timed and finished:
            raise RuntimeError(f"{finished} of {batch} requests ended before the measurement did")
        if self.arm == "lamina":
            try:
                self.stats = {k: x for k, x in self.llm.collective_rpc("lamina_stats")[0].items() if k in STATS}
            except Exception as error:
                self.stats = {"error": repr(error)}
        (start, before), (end, after) = marks[SETTLE] if timed else (began, 0), marks[-1]
        found: Row = {"ttft_mean_s": statistics.mean(first.values()), "ttft_last_s": max(first.values())}
        found["output_tokens_s"] = (after - before) / (end - start)
        found["preempted"] = sum(r.num_preemptions for r in requests)
        if not timed:
            return found | {"requests_s": batch / (end - start), "cached_tokens": cached / batch}
        steps = [1e3 * (b[0] - a[0]) for a, b in itertools.pairwise(marks[SETTLE:])]
        return found | {"step_ms_mean": statistics.mean(steps), "step_ms_median": statistics.median(steps)}

    def close(self) -> None:
        """Give the GPU back."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        try:
            if self.llm is not None:
                self.llm.llm_engine.engine_core.shutdown()
            cleanup_dist_env_and_memory()
        except Exception:
            traceback.print_exc()
        self.llm = self.engine = self.core = None
        gc.collect()
        torch.cuda.empty_cache()
        torch._dynamo.reset()


def run_arm(engine: Engine, config: Any, files: tuple[Path, Path | None], write: Any) -> None:
    """All measurements of one arm; what fails is told and left out."""
    args = engine.args
    name = {"arm": engine.arm, "tiers": "" if engine.tiers is None else json.dumps(engine.tiers)}

    def note(**said: Any) -> None:
        line = json.dumps(name | said, default=str)
        print("##", line, flush=True)
        with args.csv.with_suffix(".jsonl").open("a") as f:
            f.write(line + "\n")

    def measure(load: Load, hit: float | None, seed: int) -> None:
        case, took = {"load": load.name, "prefix_hit": "" if hit is None else hit}, 0.0
        if not (batch := engine.batch_of(load)):
            return note(**case, error="does not fit")
        for repeat in range(args.repeats):
            began = time.perf_counter()
            if began - BEGAN + took > args.deadline:
                return note(**case, error=f"no time for repeat {repeat}")
            found = engine.measure(load, batch, hit, seed + repeat)
            took = time.perf_counter() - began
            found |= {"batch": batch, "prompt_tokens": load.tokens, "repeat": repeat}
            write(name | case | engine.facts | found)
        return note(**case, batch=batch, **engine.stats)

    try:
        note(**engine.start(config, *files))
        for i, (load, hit) in enumerate(itertools.product(args.load, args.prefix_hits or [None])):
            try:
                measure(load, hit, 1000 * (i + 1))
            except Exception as error:
                traceback.print_exc()
                note(load=load.name, prefix_hit=hit, error=repr(error)[:300])
    except Exception as error:
        traceback.print_exc()
        note(error=repr(error)[:300])


def table(rows: list[Row]) -> str:
    """One line an arm and load: medians over the repeats, and prefill and output against bf16."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["load"], str(row["prefix_hit"]), row["arm"], row["tiers"]), []).append(row)

    def median(key: tuple[str, ...], name: str) -> float:
        return statistics.median(row.get(name, math.nan) for row in groups.get(key, [{}]))

    lines: list[tuple[str, ...]] = [("load", "hit", "arm", "tiers", "batch", *SHOWN, "prefill/bf16", "output/bf16")]
    for key in sorted(groups, key=lambda k: k[:2]):
        ratios = [median(key, n) / median((*key[:2], "bf16", ""), n) for n in ("prefill_tokens_s", "output_tokens_s")]
        cells = [f"{x:.5g}" for x in (*(median(key, n) for n in SHOWN), *ratios)]
        lines.append((*key, str(groups[key][0]["batch"]), *cells))
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(x.ljust(w) for x, w in zip(line, widths)).rstrip() for line in lines)


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("model", nargs="?", type=Path, help="folder of a model; only its shape is taken")
    add("--shape", choices=list(SHAPES), help="instead of a folder")
    add("--layers", type=int, help="cut the shape to so many layers")
    add("--arm", action="append", choices=list(ARMS), help="default all")
    add("--profile", type=Path, help="default Hadamard rotations")
    add("--tiers", nargs="+", type=json.loads, default=[2], help="bits, an arm each: 2, [4,2]")
    add("--lamina", type=json.loads, default={}, help="further settings of Lamina, as JSON")
    loads = [parse_load(x) for x in ("1x8192", "8x8192", "32x8192")]
    add("--load", nargs="+", type=parse_load, default=loads, help="REQUESTSxTOKENS or maxxTOKENS")
    for option, default in (("new-tokens", 128), ("repeats", 3), ("batched-tokens", 8192), ("tensor-parallel", 1)):
        add(f"--{option}", type=int, default=default)
    add("--utilization", type=float, default=0.9)
    add("--max-model-len", type=int, help="default what the loads need")
    add("--max-num-seqs", type=int, help="default the largest load; 128 where as many as fit are asked for")
    add("--prefix-hits", nargs="+", type=float, help="shares of the prompts that requests have in common, below 1")
    add("--filled", action="store_true", help="time decoding over prompts that were not computed")
    add("--eager", action="store_true")
    add("--cudagraph", default="FULL_DECODE_ONLY", choices=["FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "default"])
    add("--compile", default="0", choices=["0", "default"])
    add("--csv", type=Path, required=True)
    add("--commit", help="default what git says here")
    add("--deadline", type=float, default=math.inf, help="seconds after which no measurement starts")
    args = parser.parse_args()
    if (args.model is None) == (args.shape is None) or (args.layers and not args.shape):
        parser.error("give a model's folder or --shape; --layers needs --shape")
    if args.filled and args.prefix_hits:
        parser.error("--filled finds all prompts; leave --prefix-hits out")
    if not all(0 <= x < 1 for x in args.prefix_hits or []):
        parser.error("--prefix-hits are from 0 to below 1")
    args.arm = list(dict.fromkeys(args.arm or ARMS))
    args.max_num_seqs = args.max_num_seqs or max(x.batch or 128 for x in args.load)
    return args


def main() -> None:
    """Measure all arms and print a table."""
    args, rows = arguments(), list[Row]()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import vllm
    from report import environment
    from transformers import AutoConfig

    args.csv.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, args.csv.open("a", newline="", buffering=1) as f:
        writer = csv.DictWriter(f, COLUMNS)
        if not args.csv.stat().st_size:
            writer.writeheader()

        def write(row: Row) -> None:
            rows.append(base | row)
            shown = {k: f"{x:.6g}" if isinstance(x, float) else x for k, x in row.items()}
            writer.writerow(base | shown)
            print("##", shown, flush=True)

        model, profile = args.model or Path(scratch), args.profile
        if args.shape:
            shape = SHAPES[args.shape] | ({"num_hidden_layers": args.layers} if args.layers else {})
            (model / "config.json").write_text(json.dumps(shape))
        config = AutoConfig.from_pretrained(model)
        if profile is None and "lamina" in args.arm:
            profile = hadamard_profile(config, Path(scratch) / "hadamard.profile")
        graphs = "eager" if args.eager else f"compile {args.compile}, graphs {args.cudagraph}"
        step = f"steps of {args.max_num_seqs} requests, {args.batched_tokens} tokens"
        base = {
            "date": datetime.now(UTC).date().isoformat(), "commit": args.commit or environment()["commit"],
            "machine": environment()["device"], "vllm": vllm.__version__, "torch": torch.__version__,
            "shape": args.shape or model.resolve().name, "layers": config.get_text_config().num_hidden_layers,
            "tensor_parallel": args.tensor_parallel, "new_tokens": args.new_tokens,
            "settings": f"{graphs}, {step}, lamina {json.dumps(args.lamina)}" + ", filled" * args.filled,
        }  # fmt: skip
        for arm, tiers in ((a, t) for a in args.arm for t in (args.tiers if a == "lamina" else [None])):
            if time.perf_counter() - BEGAN > args.deadline:
                break
            engine = Engine(args, arm, tiers)
            run_arm(engine, config, (model, profile), write)
            engine.close()
    print(table(rows))


if __name__ == "__main__":
    main()
