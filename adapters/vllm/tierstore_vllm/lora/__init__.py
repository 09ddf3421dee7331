"""LoRA adapters: chunks are identified by the weights of their adapter."""
