"""Compute for one span: blocks, KV cache and the engine that steps sessions through them."""
