"""Models, tokenizers and configurations by folder or Hugging Face name, without transformers' own bars and warnings."""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub.utils
import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from lamina.app.screen import Screen
from lamina.basis.geometry import ModelGeometry, model_geometry
from lamina.basis.profile import Profile
from lamina.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LOADING_ERRORS = (OSError, ValueError, KeyError, ImportError, SafetensorError)


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, with its tokenizer and the name it was asked for by."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    geometry: ModelGeometry


def load_config(name: str, screen: Screen) -> Any:
    """Configuration of a model folder or Hugging Face model; ConfigError says why there is none."""
    _quieten()
    looks_like_path = name.startswith((".", "~", "/")) or name.count("/") > 1 or "\\" in name
    if looks_like_path and not Path(name).expanduser().is_dir():
        raise ConfigError(f"there is no model folder {name} (working directory {Path.cwd()}). Check the path.")
    where = _where(name)
    try:
        with nullcontext() if Path(where).is_dir() else screen.working(f"Looking for {name}"):
            return AutoConfig.from_pretrained(where)
    except LOADING_ERRORS as error:
        raise _not_loaded(name, "configuration", error) from error


def load_model(
    name: str, screen: Screen, *, dtype: str = "auto", device: str = "auto", profile: Profile | None = None
) -> LoadedModel:
    """Load a decoder-only model for inference.

    Parameters
    ----------
    name
        Folder, or name on the Hugging Face hub.
    screen
        Shows that loading goes on.
    dtype
        ``float32``, ``bfloat16``, ``float16``, or ``auto``: float32 on the CPU, the checkpoint's own elsewhere.
    device
        ``cpu``, ``cuda``, or ``auto``: cuda if there is one.
    profile
        Checked against the configuration before the weights are read.

    Raises
    ------
    ConfigError
        The model cannot be loaded, or ``dtype`` or ``device`` is not one of the above.
    UnsupportedModelError
        Lamina cannot serve the model.
    ProfileError
        The profile belongs to another model.
    """
    target = parse_device(device)
    weights = parse_dtype(dtype, target)
    config = load_config(name, screen)
    geometry = model_geometry(config)
    if profile is not None:
        profile.check_model(geometry)
    with screen.working(f"Loading {name}"):
        try:
            tokenizer = AutoTokenizer.from_pretrained(_where(name))
        except LOADING_ERRORS as error:
            raise _not_loaded(name, "tokenizer", error) from error
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(_where(name), dtype=weights)
        except LOADING_ERRORS as error:
            raise _not_loaded(name, "weights", error) from error
        model = model.to(target).eval()
    return LoadedModel(name, model, tokenizer, geometry)


def parse_device(device: str) -> torch.device:
    """Device of that name, ``auto`` included; ConfigError if it is unknown or not there."""
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"unknown device {device!r}; choose auto, cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("there is no CUDA device that torch can use; see `lamina doctor`, or take --device cpu")
    return torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")


def parse_dtype(dtype: str, device: torch.device) -> torch.dtype | str:
    """Torch dtype of that name; ``auto`` is float32 on the CPU and the checkpoint's own elsewhere."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}; choose auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _where(name: str) -> str:
    folder = Path(name).expanduser()
    return str(folder) if folder.is_dir() else name


def _not_loaded(name: str, what: str, error: BaseException) -> ConfigError:
    reason = str(error).strip().split("\n")[0].rstrip(".")
    return ConfigError(
        f"cannot load the {what} of the model {name!r}: {reason}. "
        "Name a transformers model folder, or a model on the Hugging Face hub that this machine can reach."
    )


def _quieten() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    huggingface_hub.utils.disable_progress_bars()
    huggingface_hub.utils.logging.set_verbosity_error()
