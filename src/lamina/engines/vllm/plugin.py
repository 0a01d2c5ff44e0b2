"""What vLLM loads in every process: the backend's name, and hooks in its workers."""

import functools
from typing import Any

from lamina.engines.vllm.config import engine_config
from lamina.errors import UnsupportedModelError

HOOKED = "_lamina_hooked"
OLDEST, NEXT = (0, 32), (0, 34)


def register() -> None:
    """Entry point of ``vllm.general_plugins``; may be called more than once."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    where = "plugin" if version_problem() else "backend"
    register_backend(AttentionBackendEnum.CUSTOM, f"lamina.engines.vllm.{where}.LaminaBackend")
    register_backend(AttentionBackendEnum.CPU_ATTN, f"lamina.engines.vllm.{where}.CpuBackend")
    if not version_problem():
        _hook_workers()


def version_problem() -> str | None:
    """Why this vLLM cannot be served, None if it can."""
    import vllm

    found = tuple(int(x) for x in vllm.__version__.split("+")[0].split(".")[:2] if x.isdigit())
    if OLDEST <= found < NEXT:
        return None
    return f"Lamina works with vLLM 0.32 and 0.33, not {vllm.__version__}; install one of these"


def __getattr__(name: str) -> Any:
    """With another version of vLLM, backends that refuse engines with Lamina and leave others to vLLM."""
    if name == "LaminaBackend":
        raise UnsupportedModelError(str(version_problem()))
    if name == "CpuBackend":
        from vllm.config import get_current_vllm_config
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        if engine_config(get_current_vllm_config().additional_config) is not None:
            raise UnsupportedModelError(str(version_problem()))
        return CPUAttentionBackend
    raise AttributeError(name)


def _hook_workers() -> None:
    """Have workers tell Lamina of their memory, of their blocks, and of every step."""
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu_worker import Worker

    if getattr(Worker, HOOKED, False):
        return
    from lamina.engines.vllm import worker

    kinds: list[type] = [Worker]
    if current_platform.is_cpu():
        # Its import turns parts of torch.accelerator off, which GPUs need.
        from vllm.v1.worker.cpu_worker import CPUWorker

        kinds.append(CPUWorker)

    setattr(Worker, HOOKED, True)
    _wrap(Worker, "initialize_from_config", worker.initialize)
    _wrap(Worker, "execute_model", worker.execute)
    _wrap(Worker, "shutdown", worker.shutdown)
    for kind in kinds:
        _wrap(kind, "determine_available_memory", worker.available_memory)
    for name in worker.CALLS:
        setattr(Worker, f"lamina_{name}", getattr(worker, name))


def _wrap(kind: type, name: str, around: Any) -> None:
    if name not in vars(kind):
        return
    inner = vars(kind)[name]

    @functools.wraps(inner)
    def outer(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(self, functools.partial(inner, self), *args, **kwargs)

    setattr(kind, name, outer)
