"""The life of pages: pools of slots, page tables, exact windows, shedding, byte accounting."""

from lamina.pages.config import WindowConfig
from lamina.pages.pool import Budget
from lamina.pages.store import LayerStore
from lamina.pages.view import StoreView
from lamina.pages.writer import EncodingWriter

__all__ = ["Budget", "EncodingWriter", "LayerStore", "StoreView", "WindowConfig"]
