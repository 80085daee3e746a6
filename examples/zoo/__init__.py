"""Models of many kinds, each trained as it is by three engines that must agree: ``python -m examples.zoo``."""
