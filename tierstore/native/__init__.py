"""What is compiled: extents are moved and verified without the interpreter."""
