"""What the templates of all pages share."""

import math

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from lamina.app.values import format_bytes


def template(name: str) -> Template:
    """A template with its filters: places, figures, bytes and words."""
    environment = Environment(
        loader=PackageLoader("lamina.app.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "place": place,
        "figure": format_figure,
        "bytes": format_bytes,
        "family": lambda name: "lamina" if name.startswith("lamina") else "other",
        "words": lambda kind: kind.replace("_", " "),
    }
    return environment.get_template(name)


def format_figure(value: float) -> str:
    """Three significant digits, – without a value."""
    if not math.isfinite(value):
        return "–"
    return f"{value:.3g}" if value == 0 or abs(value) >= 1e-4 else f"{value:.2e}"


def place(value: float) -> str:
    """A place in a picture, to a thousandth."""
    return f"{value:.3f}".rstrip("0").rstrip(".")
