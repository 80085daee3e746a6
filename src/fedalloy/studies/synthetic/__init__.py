"""Synthetic sets after a run: features, quality, leakage, pictures and export."""
