"""tierstore keeps the KV cache of an LLM inference engine in pinned host memory and on disk."""
