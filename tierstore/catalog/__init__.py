"""The catalog of a secondary tier: which records it has, where, and in which order they leave."""
