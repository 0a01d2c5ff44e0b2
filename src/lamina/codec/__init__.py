"""Rows <-> codes, in plain torch: bit planes, scale rules, page centers."""

from lamina.codec.page import PAGE_TOKENS, TIERS, CodecConfig, EncodedPages, decode_pages, encode_pages
from lamina.codec.rows import ScaleRule

__all__ = ["PAGE_TOKENS", "TIERS", "CodecConfig", "EncodedPages", "ScaleRule", "decode_pages", "encode_pages"]
