"""Running experiments: settings, sampling, the round, the driver and ``fit``."""
