"""Modules that only the benchmarks use."""
