"""Payload in segment files, one directory per rank."""
