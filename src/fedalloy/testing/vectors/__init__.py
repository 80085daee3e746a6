"""Golden vectors replayed through the real rules: one file per group, found by the group name."""
