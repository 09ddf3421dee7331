"""KV events: what vLLM publishes of blocks that come and go."""
