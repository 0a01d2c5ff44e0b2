"""Lamina: a KV cache for transformer inference whose precision is decided while the model runs."""

__version__ = "0.1.0"
