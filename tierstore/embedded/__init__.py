"""Both planes in one process."""
