"""Eviction policies of the primary tier: order over keys, nothing else."""
