"""LoRA adapters by seven methods, simulated and over a real Flower federation: ``python -m examples.adapters``."""
