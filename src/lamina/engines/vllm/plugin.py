"""What vLLM loads in every process: the backend's name, and hooks in its workers."""

import functools
import logging
from typing import Any

HOOKED = "_lamina_hooked"
OLDEST, NEXT = (0, 32), (0, 34)

logger = logging.getLogger("vllm.lamina")


def register() -> None:
    """Entry point of ``vllm.general_plugins``; may be called more than once."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    _check_version()
    register_backend(AttentionBackendEnum.CUSTOM, "lamina.engines.vllm.backend.LaminaBackend")
    register_backend(AttentionBackendEnum.CPU_ATTN, "lamina.engines.vllm.backend.CpuBackend")
    _hook_workers()


def _check_version() -> None:
    import vllm

    found = tuple(int(x) for x in vllm.__version__.split("+")[0].split(".")[:2] if x.isdigit())
    if not OLDEST <= found < NEXT:
        raise RuntimeError(f"Lamina works with vLLM 0.32 and 0.33, not {vllm.__version__}; install one of these")


def _hook_workers() -> None:
    """Have workers tell Lamina of their memory, of their blocks, and of every step."""
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    if getattr(Worker, HOOKED, False):
        return
    from lamina.engines.vllm import worker

    setattr(Worker, HOOKED, True)
    _wrap(Worker, "initialize_from_config", worker.initialize)
    _wrap(Worker, "execute_model", worker.execute)
    _wrap(Worker, "shutdown", worker.shutdown)
    for kind in (Worker, CPUWorker):
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
