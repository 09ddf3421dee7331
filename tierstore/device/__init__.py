"""A tier's path and the device below it: calls, directories, marker, blocks."""
