"""The model ``lamina`` of lm-evaluation-harness: any arm, on the harness's own tasks.

The harness knows it once this module has been imported. As a program, the module is the harness's command line with
``lamina`` known::

    python -m lamina.eval.harness --model lamina --model_args pretrained=MODEL,profile=FILE,arm=lamina-int2 --tasks piqa

In Python, import it before ``lm_eval.simple_evaluate(model="lamina", ...)``. With a model in bfloat16, the harness adds
log-likelihoods up in bfloat16 as well, unless ``softmax_dtype=float32`` is among the arguments.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lamina.basis.geometry import model_geometry
from lamina.basis.profile import Profile
from lamina.codec import PAGE_TOKENS
from lamina.engines.hf import cache_kwarg
from lamina.errors import ConfigError, LaminaError
from lamina.eval.arms import ARMS, Arm, EchoArm, LiveArm
from lamina.pages import WindowConfig

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
    from tqdm import tqdm
except ImportError as error:
    raise ConfigError(f"lm-evaluation-harness is missing ({error}); pip install 'lamina-kv[harness]'") from error


@register_model("lamina")
class LaminaLM(HFLM):
    """A transformers model whose keys and values go through the cache of an arm.

    Log-likelihoods are read 64 tokens at a time, so that every position sees what decoding would. Prompts of
    generation are read at once, as engines do.

    Parameters
    ----------
    pretrained : str or PreTrainedModel
        Model folder, name on the Hugging Face hub, or a model.
    profile : str or Path
        Profile of the model.
    arm : str
        A name of :data:`lamina.eval.arms.ARMS`.
    sink, recent : int
        Exact windows, in tokens.
    batch_size : int or str
        Requests at a time; 1 for arms whose controller goes from each request to the next.
    **options
        What the harness's model ``hf`` takes.

    Raises
    ------
    ConfigError
        The arm is unknown, there is no profile, a window is no multiple of 64 tokens, or an arm with a controller is
        given several requests at a time.
    ProfileError
        The profile cannot be read, or belongs to another model; found before the weights are read.
    """

    def __init__(
        self,
        pretrained: Any,
        profile: str | Path | None = None,
        arm: str = "lamina-k4v2",
        sink: int = 64,
        recent: int = 256,
        batch_size: int | str = 1,
        **options: Any,
    ) -> None:
        chosen = _arm(arm)
        self.in_order = isinstance(chosen, LiveArm | EchoArm)
        if self.in_order and str(batch_size) != "1":
            raise ConfigError(f"batch_size={batch_size}: the controller of {arm} takes requests one by one; use 1")
        window = WindowConfig(sink=sink, recent=recent)
        self.profile = _profile(profile)
        derived = chosen.profile(self.profile)
        super().__init__(pretrained, batch_size=batch_size, **options)
        self.profile.check_model(model_geometry(self.config))
        if self.in_order and self.world_size > 1:
            raise ConfigError(
                f"{self.world_size} processes: the controller of {arm} takes requests one by one; use one"
            )
        self.new_cache = chosen.open(self.model, derived, window)

    def _get_config(self, *args: Any, **kwargs: Any) -> None:
        """Read the configuration, and see that the profile fits."""
        super()._get_config(*args, **kwargs)
        self.profile.check_model(model_geometry(self.config))

    def _model_call(self, inps: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Logits ``[B, T, vocab]`` of tokens ``[B, T]``, read through an empty cache.

        The harness pads on the right, which causal attention never sees; pages begin where chunks do in every row.
        """
        cache = self.new_cache()
        control = getattr(cache, "control", None)
        if control is not None:
            # A controller takes a chunk for as many decode steps.
            control.decode_tokens = PAGE_TOKENS
        enabled = self.mixed_precision_dtype is not None
        with torch.no_grad(), torch.autocast(self.device.type, dtype=self.mixed_precision_dtype, enabled=enabled):
            return torch.cat([self._read(inps, start, cache) for start in range(0, inps.shape[1], PAGE_TOKENS)], 1)

    def _read(self, ids: Tensor, start: int, cache: Any) -> Tensor:
        """Logits of one chunk."""
        chunk = ids[:, start : start + PAGE_TOKENS]
        positions = torch.arange(start, start + chunk.shape[1], device=ids.device)[None]
        kwargs = cache_kwarg(self.model, cache)
        logits: Tensor = self.model(input_ids=chunk, position_ids=positions, use_cache=True, **kwargs).logits
        return logits

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options: Any) -> Tensor:
        """Prompts ``[B, T]`` and what follows them, written with an empty cache."""
        cache = cache_kwarg(self.model, self.new_cache())
        written: Tensor = super()._model_generate(context, max_length, stop, **options, **cache)
        return written

    def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None) -> Any:
        """Score requests; sorted by length, unless a controller sees them."""
        score = super()._loglikelihood_tokens
        if not self.in_order:
            return score(requests, disable_tqdm=disable_tqdm, override_bs=override_bs)
        return self._one_by_one(score, requests, disable_tqdm)

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
        """Write texts; sorted by length, unless a controller sees them."""
        write = super().generate_until
        if not self.in_order:
            return write(requests, disable_tqdm=disable_tqdm)
        return self._one_by_one(write, requests, disable_tqdm)

    def _one_by_one(self, run: Callable[..., list[Any]], requests: Sequence[Any], disable_tqdm: bool) -> list[Any]:
        bar = tqdm(requests, disable=disable_tqdm, desc="Running requests in order")
        return [run([request], disable_tqdm=True)[0] for request in bar]


def main() -> None:
    """The harness's command line; errors of Lamina end it with one line."""
    try:
        cli_evaluate()
    except LaminaError as error:
        sys.exit(f"error: {error}")


def _arm(name: str) -> Arm:
    if name not in ARMS:
        raise ConfigError(f"unknown arm {name!r}; choose from {', '.join(ARMS)}")
    return ARMS[name]


def _profile(path: str | Path | None) -> Profile:
    if path is None:
        raise ConfigError("there is no profile; add profile=FILE, made with `lamina calibrate MODEL -o FILE`")
    return Profile.load(path)


if __name__ == "__main__":
    main()
