"""What only the benchmarks need."""
