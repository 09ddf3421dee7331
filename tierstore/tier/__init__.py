"""The control half of the tiers: where chunks are, which are pinned, which are evicted next."""
