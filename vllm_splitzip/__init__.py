"""SplitZip: a bit-exact, lossless codec for KV cache, and the vLLM connector that ships it."""

__version__ = "0.1.0"

__all__ = ["__version__"]
