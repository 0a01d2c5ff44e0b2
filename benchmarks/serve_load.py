"""Does a server with Lamina hold up under concurrent streams, with tiers that change meanwhile?

    VLLM_PLUGINS=lamina python -m vllm.entrypoints.openai.api_server --model MODEL ... &
    python benchmarks/serve_load.py --url http://localhost:8000 --streams 16 --seconds 300 --csv serve_load.csv

Every stream sends one request after the other: a piece of text (this project's own by default), tokens to generate,
and every other time the same piece again, which the prefix cache knows. Each fifth of the time the tiers change. A row
for every fifth: requests, tokens, errors, the longest wait for a token, resident bytes of the server's processes, and
the server's own metrics.
"""

import argparse
import asyncio
import itertools
import json
import random
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
from report import write_csv

TIERS = (2, [4, 2], 8, [8, 4], 4)
GAUGES = ("planes_shed", "arena_used", "bits_history", "hits", "preempted")


class Load:
    """What the streams have seen."""

    def __init__(self, url: str, model: str, text: str, tokens: int, seconds: float) -> None:
        self.url, self.model, self.text, self.tokens, self.seconds = url, model, text, tokens, seconds
        self.end = time.monotonic() + seconds
        self.requests = self.answered = self.slowest = 0
        self.errors: list[str] = []

    async def stream(self, client: httpx.AsyncClient, seed: int) -> None:
        """One stream."""
        pick = random.Random(seed)
        for n in itertools.count():
            if time.monotonic() > self.end:
                return
            if n % 2 == 0:
                at = pick.randrange(len(self.text) // 2)
                prompt = self.text[at : at + pick.randrange(200, 4000)]
            body = {"model": self.model, "prompt": prompt, "max_tokens": self.tokens, "stream": True, "temperature": 0,
                    "ignore_eos": True}  # fmt: skip
            got, last = 0, time.monotonic()
            try:
                async with client.stream("POST", f"{self.url}/v1/completions", json=body) as answer:
                    async for line in answer.aiter_lines():
                        if line.startswith("data: {"):
                            got += "choices" in json.loads(line[6:])
                            self.slowest, last = max(self.slowest, time.monotonic() - last), time.monotonic()
                if answer.status_code != 200 or got < self.tokens:
                    self.errors.append(f"status {answer.status_code}, {got} of {self.tokens} tokens")
            except httpx.HTTPError as error:
                self.errors.append(repr(error))
            self.requests += 1
            self.answered += got

    async def watch(self, client: httpx.AsyncClient, pid: int) -> list[dict[str, Any]]:
        """A row for every fifth of the time."""
        rows: list[dict[str, Any]] = []
        for tiers in TIERS:
            answer = await client.post(f"{self.url}/lamina/tiers", json={"tiers": tiers})
            if answer.status_code != 200:
                self.errors.append(f"tiers: {answer.text}")
            await asyncio.sleep(self.seconds / len(TIERS))
            server = psutil.Process(pid)
            resident = sum(p.memory_info().rss for p in (server, *server.children(recursive=True)))
            told = (await client.get(f"{self.url}/metrics")).text.splitlines()
            shown = {g: next((x.split()[-1] for x in told if x.startswith(f"lamina_{g}" + "{")), "") for g in GAUGES}
            row = {"tiers": json.dumps(tiers), "requests": self.requests, "tokens": self.answered}
            row |= {"errors": len(self.errors), "slowest_token_s": f"{self.slowest:.2f}"}
            rows.append(row | {"resident_mb": resident >> 20} | shown)
            print(rows[-1], flush=True)
        return rows


async def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All streams, and the watch."""
    text = args.text.read_text(encoding="utf-8")
    async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=args.streams + 2)) as client:
        model = (await client.get(f"{args.url}/v1/models")).json()["data"][0]["id"]
        load = Load(args.url, model, text, args.tokens, args.seconds)
        streams = [asyncio.create_task(load.stream(client, i)) for i in range(args.streams)]
        rows = await load.watch(client, args.pid)
        await asyncio.gather(*streams)
        for error in load.errors[:5]:
            print("error:", error)
        print(f"{load.requests} requests, {load.answered} tokens, {len(load.errors)} errors")
    return rows


def main() -> None:
    """Load a server and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--pid", type=int, required=True, help="process of the server")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--text", type=Path, default=Path(__file__).parent.parent / "docs" / "how-it-works.md")
    parser.add_argument("--csv", type=Path, required=True)
    args = parser.parse_args()
    write_csv(asyncio.run(run(args)), args.csv)


if __name__ == "__main__":
    main()
