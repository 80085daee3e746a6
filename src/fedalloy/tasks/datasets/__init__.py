"""Loaders of examples, one per dataset."""
