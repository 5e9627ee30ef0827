"""KVDrive: a chunked, tiered KV manager with sparse attention on decode, as a module for SGLang."""

__version__ = "0.1.0"
