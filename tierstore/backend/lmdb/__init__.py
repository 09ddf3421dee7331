"""Payload in LMDB, one environment per rank."""
