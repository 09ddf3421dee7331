"""Payload stores of the secondary tiers: segment files and LMDB."""
