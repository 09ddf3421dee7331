"""Weights of LoRA adapters: what their chunks are told apart by."""
