"""How examples are dealt to clients: one rule per file."""
