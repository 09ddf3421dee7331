"""Copies to and from a CUDA device."""
