"""The control half of the tiers: what is where, who is pinned, who goes next."""
