"""Kernels that need Triton; nothing else imports it, so everything runs without it."""
