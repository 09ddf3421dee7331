"""Payload stores of the secondary tiers."""
