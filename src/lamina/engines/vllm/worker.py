"""What happens in a vLLM worker besides its own work, see :mod:`lamina.engines.vllm.plugin`."""

import json
import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lamina.attention.cuda.gpu import objection
from lamina.basis.geometry import model_geometry
from lamina.basis.profile import Profile
from lamina.codec import PAGE_TOKENS
from lamina.control.config import Policy
from lamina.control.state import Controller
from lamina.engines.hf_settings import check_canary, make_controller, parse_tiers
from lamina.engines.vllm.config import AUTO, EngineConfig, decode_tokens, engine_config, tiers_from_json
from lamina.engines.vllm.metrics_file import replace_json, stats_path
from lamina.engines.vllm.sizes import LayerShape, Sizes, exact_pages, sizes
from lamina.engines.vllm.state import Model, WorkerState
from lamina.errors import ConfigError, LaminaError, UnsupportedModelError

CALLS = ("stats", "set_tiers", "freeze", "save_controller", "load_controller", "call")
"""Functions of this module that ``collective_rpc`` reaches as ``lamina_NAME``."""

SCRATCH = 1 << 30
"""Bytes of a GPU that attention of long chunks takes while it runs, at most."""

KEPT_EVERY = 10
"""Seconds between two times that a controller's state is written, at least."""

logger = logging.getLogger("vllm.lamina")


@dataclass(frozen=True)
class Setup:
    """What a worker needs to know of its engine.

    Attributes
    ----------
    config, profile, controller
        What the user set, the profile, and who decides the tiers, if somebody does.
    shapes : list of LayerShape
        The attention layers of this worker.
    tiers : list of (int, int)
        Bits to start with, one pair a layer of ``shapes``.
    shares : Sizes
        How the bytes are shared out.
    """

    config: EngineConfig
    profile: Profile
    controller: Controller | None
    shapes: list[LayerShape]
    tiers: list[tuple[int, int]]
    shares: Sizes


def available_memory(worker: Any, inner: Any) -> int:
    """Bytes for vLLM's blocks: what there is, less the arena and exact rows."""
    n_bytes: int = inner()
    config = engine_config(worker.vllm_config.additional_config)
    if config is None:
        return n_bytes
    worker.lamina_setup = setup = _set_up(worker, config, n_bytes)
    return setup.shares.blocks * setup.shares.block_bytes


def initialize(worker: Any, inner: Any, kv_cache_config: Any) -> None:
    """Lay pages into vLLM's blocks once they are there."""
    inner(kv_cache_config)
    if engine_config(worker.vllm_config.additional_config) is None:
        return
    setup: Setup = worker.lamina_setup
    config, shares, blocks = setup.config, setup.shares, kv_cache_config.num_blocks
    # vLLM takes what fits on all ranks, or what it was told to.
    slabs = blocks * (shares.slabs // shares.blocks) if config.arena_gb == AUTO else shares.slabs
    shares = replace(shares, blocks=blocks, slabs=slabs, exact_pages=min(shares.exact_pages, blocks))
    layers = list(_attention_layers(worker).values())
    records = [_records(layer.kv_cache, shape) for layer, shape in zip(layers, setup.shapes)]
    model = Model(
        setup.profile, setup.shapes, [layer.impl.scale for layer in layers], worker.model_config.dtype,
        layers[0].impl.num_heads, worker.vllm_config.scheduler_config.max_num_seqs, decode_tokens(worker.vllm_config),
    )  # fmt: skip
    state = WorkerState(config, model, records, shares, setup.tiers, setup.controller, _mean_losses)
    for i, layer in enumerate(layers):
        layer.impl.attach(state, i)
    state.warm_up(layers[0].impl.itself)
    worker.lamina, worker.lamina_setup = state, None
    if config.controller_state is not None and Path(config.controller_state).is_file():
        load_controller(worker, config.controller_state)
    logger.info("%s", summary(worker, state))


def execute(worker: Any, inner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
    """One step."""
    state = getattr(worker, "lamina", None)
    if state is not None:
        state.begin_step(scheduler_output)
        _keep_state(worker, state)
        if worker.rank % worker.parallel_config.tensor_parallel_size == 0:
            state.tell(stats_path(worker.vllm_config), worker.parallel_config.data_parallel_index)
    return inner(scheduler_output, *args, **kwargs)


def shutdown(worker: Any, inner: Any, *args: Any, **kwargs: Any) -> Any:
    """Save the controller's state where that was asked for."""
    state = getattr(worker, "lamina", None)
    if state is not None:
        _keep_state(worker, state, ends=True)
        stats_path(worker.vllm_config).unlink(missing_ok=True)
    return inner(*args, **kwargs)


def summary(worker: Any, state: WorkerState) -> str:
    """One line: bits, tokens of capacity and requests at the model's length, next to 16 bits."""
    shares, length = state.shares, worker.model_config.max_model_len
    dense = sum(16 * shape.layout.slab_bytes for shape in state.model.shapes)
    parts = {
        "blocks": shares.blocks * shares.block_bytes,
        "tables": shares.blocks * shares.book_bytes,
        "arena": shares.slabs * shares.slab_bytes,
        f"{shares.exact_pages} exact pages": shares.exact_pages * shares.exact_bytes,
    }
    total = sum(parts.values())

    def holds(blocks: int) -> str:
        return f"{PAGE_TOKENS * blocks:,} tokens, {PAGE_TOKENS * blocks / length:.1f} requests of {length:,}"

    shared = ", ".join(f"{what} {n / 1e9:.2f}" for what, n in parts.items())
    return (
        f"Lamina: {state.average_bits:.2f} bits, {holds(shares.blocks)} in {total / 1e9:.2f} GB ({shared}); "
        f"16 bits: {holds(total // dense)}"
    )


def stats(worker: Any) -> dict[str, Any]:
    """Figures of this worker, see :meth:`WorkerState.stats`."""
    return _state(worker).stats()


def set_tiers(worker: Any, tiers: Any) -> None:
    """Set the bits of pages that close from now on; the controller, if there is one, must be frozen."""
    state = _state(worker)
    parsed = parse_tiers(tiers_from_json(tiers), state.model.profile.tiers)
    chosen = [parsed[s.index] for s in state.model.shapes]
    if state.config.deterministic:
        raise ConfigError("tiers are fixed: the engine was started with deterministic")
    if state.controller is None:
        state.fixed_tiers = chosen
    elif state.controller.frozen:
        state.controller.tiers = chosen
    else:
        raise ConfigError("the controller decides the tiers; freeze it first")


def freeze(worker: Any, frozen: bool = True) -> None:
    """Stop the controller, or let it go on."""
    controller = _controller(worker)
    controller.frozen = frozen


def save_controller(worker: Any, path: str) -> None:
    """Write the controller's state; a file that is already there is replaced in one step."""
    replace_json(Path(path), _controller(worker).snapshot())


def load_controller(worker: Any, path: str) -> None:
    """Read a state that :func:`save_controller` wrote."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read as a controller's state ({error}); remove it to start anew"
        ) from error
    try:
        _controller(worker).load(found)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def call(worker: Any, name: str, *args: Any) -> Any:
    """One of ``CALLS`` by its name, which tells what was wrong instead of ending the engine."""
    try:
        return {n: globals()[n] for n in CALLS}[name](worker, *args)
    except (LaminaError, TypeError) as error:
        return {"error": str(error)}


def _keep_state(worker: Any, state: WorkerState, ends: bool = False) -> None:
    """Write the controller's state if that was asked for: after decisions, as workers may be killed, and at the end."""
    path, now = state.config.controller_state, time.monotonic()
    if path is None or worker.rank != 0:
        return
    decided = state.counts["firings"] != state.kept_firings and now - state.kept_at >= KEPT_EVERY
    if ends or decided:
        state.kept_firings, state.kept_at = state.counts["firings"], now
        save_controller(worker, path)


def _state(worker: Any) -> WorkerState:
    state = getattr(worker, "lamina", None)
    if state is None:
        raise ConfigError("Lamina is not configured in this engine; give --additional-config with a lamina object")
    return state


def _controller(worker: Any) -> Controller:
    controller = _state(worker).controller
    if controller is None:
        raise ConfigError("this engine has no controller; start it with one in additional_config")
    return controller


def _attention_layers(worker: Any) -> dict[int, Any]:
    """Attention layers by their index, in the order in which they run."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.models.utils import extract_layer_index

    from lamina.engines.vllm.backend import LaminaImpl

    found = {}
    for name, layer in get_layers_from_vllm_config(worker.vllm_config, AttentionLayerBase).items():
        if not isinstance(getattr(layer, "impl", None), LaminaImpl):
            raise UnsupportedModelError(
                f"layer {name} is not attended by Lamina; give --attention-backend CUSTOM, and a model whose layers "
                "all have full attention"
            )
        found[extract_layer_index(name)] = layer
    return dict(sorted(found.items()))


def _set_up(worker: Any, config: EngineConfig, n_bytes: int) -> Setup:
    """Check the engine against the profile, and share its bytes out."""
    vllm_config = worker.vllm_config
    _refuse(worker, config)
    profile = Profile.load(config.profile)
    geometry = model_geometry(vllm_config.model_config.hf_config)
    profile.check_model(geometry)
    size, scheduler = vllm_config.parallel_config.tensor_parallel_size, vllm_config.scheduler_config
    rank, shapes = worker.rank % size, []
    for index, layer in _attention_layers(worker).items():
        first = rank * geometry.layers[index].n_kv_heads // size
        shapes.append(LayerShape(index, layer.num_kv_heads, first, layer.head_size))
    if len({(s.n_heads, s.head_dim) for s in shapes}) != 1:
        raise UnsupportedModelError("the model's attention layers differ in KV heads or head dimension")
    parsed = parse_tiers(config.tiers, profile.tiers)
    tiers = [parsed[s.index] for s in shapes]
    controller = make_controller(config.controller_settings(), None, geometry, profile)
    check_canary(controller, config.window())
    if controller is not None:
        controller.reduce = _mean_over_ranks
    queries = decode_tokens(vllm_config)
    most = exact_pages(config.window(), scheduler.max_num_seqs, scheduler.max_num_batched_tokens, queries)
    n_bytes -= SCRATCH * (worker.device.type == "cuda")
    shares = sizes(
        n_bytes, shapes, worker.model_config.dtype.itemsize, tiers, config.arena_gb, most, _target(controller)
    )
    return Setup(config, profile, controller, shapes, tiers, shares)


def _target(controller: Controller | None) -> float:
    """Average tier that a controller will decide on; those that follow a threshold may want any."""
    if controller is None:
        return 2.0
    settings = controller.config
    return settings.target_bits if settings.policy == Policy.ALLOCATE else float(max(settings.tiers))


def _refuse(worker: Any, config: EngineConfig) -> None:
    """Raise UnsupportedModelError naming an option that Lamina does not serve."""
    vllm_config = worker.vllm_config
    cache, parallel, speculative = vllm_config.cache_config, vllm_config.parallel_config, vllm_config.speculative_config
    device, head_dim = worker.device, vllm_config.model_config.get_head_size()
    problem = None if device.type == "cpu" else objection(device, vllm_config.model_config.dtype, head_dim)
    refused = {
        f"this model on {device.type}: {problem}": problem is not None,
        "speculative decoding with asynchronous scheduling (give --no-async-scheduling)": speculative is not None
        and bool(vllm_config.scheduler_config.async_scheduling),
        f"speculative decoding by {getattr(speculative, 'method', None)} (give ngram)": speculative is not None
        and speculative.method != "ngram",
        "a controller with pipeline parallelism": config.controller is not None and parallel.pipeline_parallel_size > 1,
        f"--block-size {cache.block_size} (give 64)": cache.block_size != 64,
        f"--kv-cache-dtype {cache.cache_dtype} (leave it at auto)": cache.cache_dtype != "auto",
        "data parallelism with vLLM's V1 model runner": device.type == "cuda"
        and parallel.data_parallel_size > 1
        and not getattr(vllm_config, "use_v2_model_runner", True),
        "a KV connector": vllm_config.kv_transfer_config is not None,
        "sleep mode": bool(getattr(vllm_config.model_config, "enable_sleep_mode", False)),
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "prefill context parallelism": getattr(parallel, "prefill_context_parallel_size", 1) > 1,
    }
    for what, is_set in refused.items():
        if is_set:
            raise UnsupportedModelError(f"Lamina in vLLM does not serve {what}")


def _records(kv_cache: torch.Tensor, shape: LayerShape) -> torch.Tensor:
    """One layer's blocks as records; they are vLLM's memory itself."""
    n_bytes = shape.layout.record_bytes
    if kv_cache.dtype != torch.uint8 or kv_cache[0].numel() != n_bytes or not kv_cache.is_contiguous():
        raise LaminaError(
            f"vLLM's blocks of layer {shape.index} are {tuple(kv_cache.shape)} {kv_cache.dtype} with strides "
            f"{kv_cache.stride()}, not {n_bytes} bytes each behind each other"
        )
    return kv_cache.view(len(kv_cache), n_bytes)


def _mean_over_ranks(table: list[list[float]]) -> list[list[float]]:
    """Signals averaged over the ranks of tensor parallelism, so that all decide alike."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return table
    flat = torch.tensor([x for row in table for x in row] or [0.0], dtype=torch.float64)
    torch.distributed.all_reduce(flat, group=group.cpu_group)
    mean = (flat / group.world_size).tolist()
    return [[mean.pop(0) for _ in row] for row in table]


def _mean_losses(losses: torch.Tensor) -> torch.Tensor:
    """Predicted losses averaged over the ranks of tensor parallelism, so that all shed alike."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    return losses if group.world_size == 1 else group.all_reduce(losses) / group.world_size
