"""What tierstore is tested with: conformance suites, state machines, faults."""
