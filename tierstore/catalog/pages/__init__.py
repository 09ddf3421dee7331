"""Pages of a tier: given out, charged, freed and given back."""
