"""Routes of vLLM's API server that tell of Lamina and steer it; loaded where ``VLLM_PLUGINS`` names ``lamina``."""

import json
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
            return await _set(request, "set_tiers", "tiers", int | list | None)

        @app.post("/lamina/freeze")
        async def freeze(request: Request) -> JSONResponse:
            return await _set(request, "freeze", "frozen", bool)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Remember the engine."""
        state.lamina_engine = engine_client


async def _set(request: Request, name: str, key: str, kind: Any) -> JSONResponse:
    try:
        body = await request.json()
    except ValueError:
        body = None
    if not isinstance(body, dict) or list(body) != [key] or not isinstance(body[key], kind):
        example = {"tiers": [4, 2], "frozen": True}[key]
        return JSONResponse({"error": f"the body is not an object like {json.dumps({key: example})}"}, 400)
    return await _call(request, name, body[key])


async def _call(request: Request, name: str, *args: Any) -> JSONResponse:
    engine = getattr(request.app.state, "lamina_engine", None)
    if engine is None:
        return JSONResponse({"error": "this server has no engine"}, 503)
    answers = await engine.collective_rpc("lamina_call", args=(name, *args))
    wrong = [a["error"] for a in answers if isinstance(a, dict) and "error" in a]
    return JSONResponse({"error": wrong[0]}, 400) if wrong else JSONResponse(answers)
