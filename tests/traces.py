"""Traces written by hand, with known answers."""

import json

START = {
    "event": "start",
    "seconds": 0.0,
    "format": "lamina-trace",
    "version": 1,
    "lamina": "0.1.0",
    "model": "hand <&> made",
    "layers": [3, 7, 11, 15],
    "kv_heads": [8, 2, 2, 2],
    "head_dims": [64, 64, 64, 32],
    "page_tokens": 64,
    "window": {"sink": 64, "recent": 128, "rollback": 64},
    "controller": {"policy": "threshold", "rate": 0.25, "tiers": [2, 4, 8], "tau0": 0.02},
    "tiers": [[2, 2], [4, 4], [2, 8], [2, 2]],
    "max_bytes": 5000000,
}


def firing(step, tiers, seconds, ema=None, tau=0.02):
    ema = [[0.1, 0.01, 0.001]] * 8 if ema is None else ema
    return {
        "event": "firing",
        "seconds": seconds,
        "step": step,
        "context": 400 + step,
        "tau": tau,
        "signals": ema,
        "ema": ema,
        "tiers": tiers,
    }


def closed(layer, starts, tier, seconds=1.0):
    return {"event": "closed", "seconds": seconds, "layer": layer, "starts": starts, "tier": tier}


def shed(layer, start, side, bits):
    event = {"event": "shed", "seconds": 1.0, "layer": layer, "start": start}
    return {**event, "side": side, "bits": bits, "loss": 0.5}


def memory(tokens, n_bytes, history=3.0, context=6.0, seconds=2.0, host=0):
    kinds = {"codes": n_bytes - host - 1000, "windows": 1000} | ({"host_layers": host} if host else {})
    fields = {"bits_history": history, "bits_at_context": context, "planes_shed": 0, "exact_shed": 0}
    return {"event": "memory", "seconds": seconds, "tokens": tokens, "bytes": n_bytes, "kinds": kinds, **fields}


END = {"event": "end", "seconds": 9.0}

EVENTS = [
    START,
    closed(7, [0, 64, 128, 192, 256, 320], [8, 4]),
    closed(3, [0, 64, 128, 192, 256, 320], [4, 2]),
    memory(400, 600000, None, 12.0, 1.5),
    firing(16, [[4, 2], [4, 2], [8, 2], [2, 2]], 2.0),
    shed(7, 64, "k", 4),
    shed(7, 64, "k", 2),
    shed(7, 128, "v", 2),
    firing(32, [[2, 2], [8, 2], [8, 4], [2, 2]], 4.0, tau=0.03),
    closed(7, [384], [8, 2]),
    memory(448, 900000, 3.5, 10.0, 8.0, host=100000),
    END,
]


def write(file, events=EVENTS, tail=""):
    file.write_text("".join(json.dumps(event) + "\n" for event in events) + tail)
    return file
