"""How often verdicts and intervals are wrong, measured where the truth is known."""
