"""Finds the clusters that may hold a key, without a row per record."""
