"""A peer serves a span of transformer blocks to clients."""
