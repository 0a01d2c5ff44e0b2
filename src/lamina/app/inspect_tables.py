"""Inspections as tables for people."""

from typing import TYPE_CHECKING, Any

from rich.table import Table

from lamina.app.cache_facts import CacheFacts
from lamina.app.profile_facts import LayerFacts, ProfileFacts
from lamina.app.tables import facts_table, figures_table
from lamina.app.values import format_bytes

if TYPE_CHECKING:
    from lamina.app.inspection import Inspection


def inspection_tables(found: "Inspection") -> list[Table]:
    """The file's facts, then its layers."""
    head = [("file", f"{found.file} ({format_bytes(found.file_bytes)})"), ("format", found.format)]
    if isinstance(found.facts, ProfileFacts):
        return [facts_table(head + _profile_lines(found.facts)), _layer_table(found.facts.layers)]
    return [facts_table(head + _cache_lines(found.facts)), *_byte_tables(found.facts)]


def _profile_lines(facts: ProfileFacts) -> list[tuple[str, str]]:
    heads = sorted({(layer.n_heads, layer.head_dim) for layer in facts.layers})
    shapes = " or ".join(f"{n} KV heads of dimension {dim}" for n, dim in heads)
    left_out = facts.n_layers - len(facts.layers)
    others = f", {left_out} of them not packed" if left_out else ""
    positions = "not recorded"
    if facts.max_position is not None:
        positions = f"{'random, up' if facts.random_positions else '0'} to {facts.max_position:,}"
    return [
        ("model", facts.model_id),
        ("configuration", facts.config_hash),
        ("made by", f"Lamina {facts.package_version}"),
        ("geometry", f"{facts.n_layers} layers{others}, {shapes}"),
        ("transform", facts.transform + (", value basis folded into the model" if facts.absorbed else "")),
        ("initial tiers", _tiers(facts.tiers)),
        *_tuning_lines(facts),
        ("tokens", "not recorded" if facts.tokens is None else f"{facts.tokens:,}"),
        ("positions", positions),
        ("moments", "kept: other transforms can be derived" if facts.has_moments else "not kept"),
    ]


def _tuning_lines(facts: ProfileFacts) -> list[tuple[str, str]]:
    if facts.tuning is None:
        return [("controller", "not tuned")]
    c, measured = facts.tuning["settings"], facts.tuning["measured"]
    shown = ("policy", "target_bits" if c.get("policy") == "allocate" else "tau0")
    rule = ", ".join(f"{name} {_text(c.get(name))}" for name in shown)
    return [("controller", rule), ("tuned for", measured.get("goal", "nothing yet"))]


def _tiers(tiers: list[str]) -> str:
    if len(set(tiers)) == 1:
        return f"{tiers[0]} in every layer"
    return ", ".join(f"{i}: {tier}" for i, tier in enumerate(tiers))


def _layer_table(layers: list[LayerFacts]) -> Table:
    names = ("condition", "key spread", "kappa", "q energy", "v energy", "v offset", "K at 2", "V at 2")
    table = figures_table("", "layer", names)
    for one in layers:
        figures = (one.condition, one.key_spread, one.kappa, one.q_energy, one.v_energy, one.value_offset)
        table.add_row(str(one.layer), *map(_figure, (*figures, one.output_kl_k2, one.output_kl_v2)))
    table.caption = (
        "condition of the key basis; largest over smallest eigenvalue of the keys' moment; squared error of 2-bit keys "
        "in squared steps;\nsquared norms of queries and values in the packed basis; mean value over rms value;\nKL of "
        "the output with this side at 2 bits, if the profile is tuned"
    )
    return table


def _cache_lines(facts: CacheFacts) -> list[tuple[str, str]]:
    lengths = facts.lengths
    sequences = "not recorded" if lengths is None else ", ".join(f"{n:,}" for n in lengths) + " tokens"
    return [
        ("model", _text(facts.model_id)),
        ("configuration", _text(facts.config_hash)),
        ("made by", f"Lamina {_text(facts.package_version)}"),
        ("dtype", _text(facts.dtype)),
        ("window", _window(facts.window)),
        ("sequences", sequences),
        ("layers", f"{facts.n_layers}"),
        ("tensors", format_bytes(sum(facts.bytes_by_name.values()))),
    ]


def _byte_tables(facts: CacheFacts) -> list[Table]:
    tables = []
    for first, n_bytes in (("tensor", facts.bytes_by_name), ("layer", facts.bytes_by_layer)):
        table = figures_table("", first, ("bytes",))
        for name, n in n_bytes.items():
            table.add_row(name, format_bytes(n))
        tables.append(table)
    return tables


def _window(window: Any) -> str:
    if isinstance(window, dict):
        return ", ".join(f"{name} {value}" for name, value in window.items())
    return _text(window)


def _text(value: Any) -> str:
    return "not recorded" if value is None else str(value)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
