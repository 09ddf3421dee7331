"""Records as bytes: their header, with checksums or with keys."""
