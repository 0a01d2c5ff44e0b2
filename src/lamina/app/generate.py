"""What ``lamina generate`` does: a prompt through a packed cache, streamed, with what the cache took."""

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedTokenizerBase
from transformers.generation.streamers import TextStreamer

from lamina.app.loading import LoadedModel, load_model
from lamina.app.output import check_output
from lamina.app.screen import Screen
from lamina.app.speed import UNTIMED_STEPS
from lamina.app.values import format_bytes, parse_bytes, parse_tier
from lamina.app.watch import Watch
from lamina.basis.profile import Profile
from lamina.codec import TIERS
from lamina.control.config import ControllerConfig, Policy
from lamina.control.trace import Trace
from lamina.control.tuning import settings_of
from lamina.engines.hf import LaminaCache, cache_kwarg
from lamina.engines.hf_graph import DecodeGraph
from lamina.errors import ConfigError, DataError
from lamina.pages import WindowConfig


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; temperature 0 takes the most likely one."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Check every field."""
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature {self.temperature} is negative; use 0 for the most likely token, or more")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top-p {self.top_p} is no share of the probability; use a number above 0 and up to 1")
        if self.top_p < 1 and self.temperature == 0:
            raise ConfigError(f"top-p {self.top_p} does nothing at temperature 0; set a temperature as well")

    def options(self) -> dict[str, Any]:
        """Arguments of transformers' ``generate``."""
        if self.temperature == 0:
            return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        return {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": 0}


@dataclass(frozen=True)
class GenerationRequest:
    """What to write and with which cache; fields are the options of ``lamina generate``."""

    model: str
    profile: Path
    prompt: str | None = None
    prompt_file: Path | None = None
    max_new_tokens: int = 256
    tier: str | None = None
    sink: int = 64
    recent: int = 256
    max_bytes: str | None = None
    live: bool | None = None
    target_bits: float | None = None
    trace: Path | None = None
    watch: bool = False
    sampling: Sampling = Sampling()
    chat: bool | None = None
    dtype: str = "auto"
    device: str = "auto"


@dataclass(frozen=True)
class Generated:
    """A finished text and how long it took; ``tokens_per_second`` is of decoding, None if too few tokens."""

    text: str
    prompt_tokens: int
    tokens: int
    prefill_seconds: float
    tokens_per_second: float | None


@dataclass(frozen=True)
class GenerationReport:
    """A text and the cache it left behind."""

    text: str
    prompt_tokens: int
    tokens: int
    prefill_seconds: float
    tokens_per_second: float | None
    bits_history: float
    bits_at_context: float
    tier_mean: float
    firings: int | None
    kv_bytes: int
    kv_bytes_bf16: int
    planes_shed: int
    exact_shed: int

    def as_json(self) -> dict[str, Any]:
        """The document that ``--json`` writes."""
        return asdict(self)

    def summary(self) -> str:
        """One line on tokens, speed, bits and bytes."""
        speed = "" if self.tokens_per_second is None else f", {self.tokens_per_second:.1f} tok/s"
        packed = self.bits_history == self.bits_history
        history = f"{self.bits_history:.2f} bits in history" if packed else "no history yet"
        tiers = f", tiers {self.tier_mean:.2f} on average" if self.tier_mean == self.tier_mean else ""
        live = "" if self.firings is None else f"{self.firings} firings{tiers}; "
        return (
            f"{self.tokens} tokens{speed}; {history}, {self.bits_at_context:.2f} bits at this context; {live}"
            f"KV cache {format_bytes(self.kv_bytes)} against {format_bytes(self.kv_bytes_bf16)} in bf16; "
            f"{self.planes_shed} planes shed{f', exact rows of {self.exact_shed} pages' if self.exact_shed else ''}"
        )


class _Stream(TextStreamer):
    """Hands on finished text, and remembers when each token came."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, on_first: Callable[[], Any], on_text: Callable[[str], Any]
    ) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.on_first, self.on_text = on_first, on_text
        self.pieces: list[str] = []
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        if not self.next_tokens_are_prompt:
            if not self.times:
                self.on_first()
            self.times.append(time.perf_counter())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.pieces.append(text)
        self.on_text(text)


def run_generation(request: GenerationRequest, screen: Screen, *, stream: bool = True) -> GenerationReport:
    """Generate with a packed cache; the text goes to stdout as it comes if ``stream``."""
    prompt = read_prompt(request.prompt, request.prompt_file)
    tiers = None if request.tier is None else parse_tier(request.tier)
    max_bytes = None if request.max_bytes is None else parse_bytes(request.max_bytes, "--max-bytes")
    window = WindowConfig(sink=request.sink, recent=request.recent)
    profile = Profile.load(request.profile)
    settings = controller_settings(request, profile)
    if settings is not None and profile.tuning is None:
        screen.warn(
            "The profile is not tuned: pages get its own tiers until the first decision, and all layers count alike. "
            "`lamina tune` measures which layers matter."
        )
    if request.trace is not None:
        check_output(request.trace, "--trace", "run.jsonl")
        for read in (request.profile, request.prompt_file):
            if read is not None and request.trace.resolve() == read.resolve():
                raise ConfigError(f"--trace {request.trace} would replace a file that is read; name another one")
    loaded = load_model(request.model, screen, dtype=request.dtype, device=request.device, profile=profile)
    ids = encode_prompt(loaded, prompt, chat=request.chat)
    check_room(loaded, ids, request.max_new_tokens)
    cache = LaminaCache(loaded.model, profile, tiers=tiers, window=window, max_bytes=max_bytes, controller=settings)
    firings: list[Any] = []
    if settings is not None:
        cache.listeners.append(lambda event: firings.append(event) if event["event"] == "firing" else None)
    with ExitStack() as watching:
        if request.trace is not None:
            watching.enter_context(Trace(request.trace, cache))
        write = screen.write
        if request.watch:
            write = watching.enter_context(Watch(cache, screen.err)).write
        if loaded.model.device.type == "cuda" and DecodeGraph.problem(loaded.model, cache) is None:
            watching.enter_context(DecodeGraph(loaded.model, cache))
        done = generate_text(
            loaded,
            ids,
            cache,
            max_new_tokens=request.max_new_tokens,
            sampling=request.sampling,
            on_text=write if stream else None,
            screen=None if request.watch else screen,
        )
    if stream:
        screen.write("\n")
    return report_on(done, cache, loaded, None if settings is None else len(firings))


def controller_settings(request: GenerationRequest, profile: Profile) -> ControllerConfig | None:
    """Settings of the live controller, None for fixed tiers; ConfigError for options that exclude each other."""
    live = request.live
    if live is None:
        live = request.target_bits is not None or (profile.tuning is not None and request.tier is None)
    if not live:
        if request.target_bits is not None:
            raise ConfigError("--target-bits needs the live controller; leave out --fixed")
        return None
    if request.tier is not None:
        raise ConfigError(f"--tier {request.tier} fixes the tiers, --live decides them; leave one out")
    if request.target_bits is not None:
        if not TIERS[0] <= request.target_bits <= TIERS[-1]:
            raise ConfigError(f"--target-bits {request.target_bits:g} must be between {TIERS[0]} and {TIERS[-1]}")
        return ControllerConfig(policy=Policy.ALLOCATE, target_bits=request.target_bits)
    if profile.tuning is None:
        raise ConfigError(
            f"{request.profile} has no controller settings; make some with `lamina tune`, or give --target-bits"
        )
    return settings_of(profile.tuning)


def generate_text(
    loaded: LoadedModel,
    ids: Tensor,
    cache: Cache,
    *,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),
    on_text: Callable[[str], Any] | None = None,
    screen: Screen | None = None,
) -> Generated:
    """Continue ``ids`` (int64 ``[1, T]``) with any cache of transformers' kind, handing text on as it comes.

    Until the first token is there, ``screen`` shows that the prompt is being read.
    """
    with ExitStack() as waiting:
        if screen is not None:
            waiting.enter_context(screen.working(f"Reading {ids.shape[1]:,} tokens of prompt"))
        stream = _Stream(loaded.tokenizer, waiting.close, on_text or (lambda text: None))
        torch.manual_seed(sampling.seed)
        start = time.perf_counter()
        ids = ids.to(loaded.model.device)
        model: Any = loaded.model
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            streamer=stream,
            **cache_kwarg(loaded.model, cache),
            **sampling.options(),
        )
    times = stream.times
    timed = times[UNTIMED_STEPS:]
    return Generated(
        text="".join(stream.pieces),
        prompt_tokens=ids.shape[1],
        tokens=len(times),
        prefill_seconds=times[0] - start,
        tokens_per_second=(len(timed) - 1) / (timed[-1] - timed[0]) if len(timed) > 1 else None,
    )


def report_on(done: Generated, cache: LaminaCache, loaded: LoadedModel, firings: int | None = None) -> GenerationReport:
    """Put a text and its cache's figures together."""
    bits = cache.bits()
    memory = cache.memory()
    return GenerationReport(
        **asdict(done),
        bits_history=bits["history"],
        bits_at_context=bits["context"],
        tier_mean=cache.average_tier,
        firings=firings,
        kv_bytes=sum(memory.values()),
        kv_bytes_bf16=2 * loaded.geometry.elements(cache.get_seq_length()) + memory.get("host_layers", 0),
        planes_shed=cache.pager.planes_shed,
        exact_shed=cache.pager.exact_shed,
    )


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt as given, from a file, or from standard input; ConfigError or DataError if there is none."""
    if prompt is not None and prompt_file is not None:
        raise ConfigError("--prompt and --prompt-file are both given; leave one out")
    if prompt_file is not None:
        try:
            prompt = prompt_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot read the prompt file {prompt_file}: {error}. Name a UTF-8 text file.") from error
    elif prompt is None:
        prompt = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read()
    if not prompt.strip():
        raise DataError("the prompt is empty; give --prompt TEXT, --prompt-file FILE, or pipe text into the command")
    return prompt


def encode_prompt(loaded: LoadedModel, prompt: str, *, chat: bool | None) -> Tensor:
    """Token ids int64 ``[1, T]``; ``chat`` applies the chat template, None if there is one."""
    has_template = bool(getattr(loaded.tokenizer, "chat_template", None))
    if chat and not has_template:
        raise ConfigError(f"the tokenizer of {loaded.name} has no chat template; use --no-chat")
    if has_template and chat is not False:
        messages = [{"role": "user", "content": prompt}]
        encoded: Any = loaded.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        encoded = loaded.tokenizer(prompt, return_tensors="pt", verbose=False)
    ids: Tensor = encoded["input_ids"].long()
    if not ids.numel():
        raise DataError("the prompt has no tokens that the model's tokenizer knows; give another prompt")
    return ids


def check_room(loaded: LoadedModel, ids: Tensor, max_new_tokens: int) -> None:
    """Raise ConfigError if prompt and answer are longer than the model's positions."""
    total, limit = ids.shape[1] + max_new_tokens, loaded.geometry.max_positions
    if total > limit:
        raise ConfigError(
            f"a prompt of {ids.shape[1]} tokens and {max_new_tokens} new ones exceed the model's {limit} positions; "
            f"shorten the prompt or lower --max-new-tokens"
        )
