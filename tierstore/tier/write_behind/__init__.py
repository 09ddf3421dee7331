"""Chunks on their way down into a secondary tier, and bytes on their way back."""
