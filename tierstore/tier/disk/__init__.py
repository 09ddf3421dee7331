"""A secondary tier on this machine: its catalog, behind threads that may wait."""
