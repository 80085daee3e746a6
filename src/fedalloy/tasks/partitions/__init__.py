"""Rules that assign examples to clients, one per file."""
