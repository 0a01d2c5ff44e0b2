"""Lamina as an attention backend of vLLM, loaded by vLLM itself as a plug-in."""
