"""A Flower app as it would be written without fedalloy; see benchmarks/flower.py."""
