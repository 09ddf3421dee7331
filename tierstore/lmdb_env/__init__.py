"""LMDB environments: opened, sealed, verified, locked. The only import of lmdb."""
