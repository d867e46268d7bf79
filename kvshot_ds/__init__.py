"""kvshot-ds: train speculative-decoding drafters that reuse the target's hidden states and KV cache."""

__version__ = "0.1.0"
