"""How much each contribution counts."""
