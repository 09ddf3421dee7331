"""Copy engines: GPU blocks <-> slots."""
