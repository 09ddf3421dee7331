"""The primary tier: which chunk lies in which slot of the pool."""
