"""Studies over many runs or beside them: comparisons, published claims, learned weights, synthetic sets."""
