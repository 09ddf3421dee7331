"""Conformance suites and models for those who write policies, backends and copy engines."""
