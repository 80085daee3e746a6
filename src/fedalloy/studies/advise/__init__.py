"""Which method to use: a federation is described, methods are tried on it with equal budgets, and evidence decides."""
