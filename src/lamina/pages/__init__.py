"""The life of pages: pools of slots, page tables, exact windows, shedding, byte accounting."""

from lamina.pages.config import WindowConfig
from lamina.pages.pool import Budget
from lamina.pages.store import LayerStore
from lamina.pages.view import StoreView

__all__ = ["Budget", "LayerStore", "StoreView", "WindowConfig"]
