"""Routes of vLLM's API server that tell of Lamina and steer it; loaded where ``VLLM_PLUGINS`` names ``lamina``."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse


class LaminaRoutes:
    """``GET /lamina``: figures of every worker; ``POST /lamina/tiers``, ``/lamina/freeze``: what new pages get."""

    name = "lamina"
    required_tasks = None

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes."""

        @app.get("/lamina")
        async def stats(request: Request) -> JSONResponse:
            return await _call(request, "stats")

        @app.post("/lamina/tiers")
        async def tiers(request: Request) -> JSONResponse:
            return await _call(request, "set_tiers", (await request.json()).get("tiers"))

        @app.post("/lamina/freeze")
        async def freeze(request: Request) -> JSONResponse:
            return await _call(request, "freeze", bool((await request.json()).get("frozen", True)))

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Remember the engine."""
        state.lamina_engine = engine_client


async def _call(request: Request, name: str, *args: Any) -> JSONResponse:
    engine = getattr(request.app.state, "lamina_engine", None)
    if engine is None:
        return JSONResponse({"error": "this server has no engine"}, 503)
    answers = await engine.collective_rpc("lamina_call", args=(name, *args))
    wrong = [a["error"] for a in answers if isinstance(a, dict) and "error" in a]
    return JSONResponse({"error": wrong[0]}, 400) if wrong else JSONResponse(answers)
