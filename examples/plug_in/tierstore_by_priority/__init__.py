"""A tierstore plug-in: what urgent requests use stays in memory, and goes to disk."""
