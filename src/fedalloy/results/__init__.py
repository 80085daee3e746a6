"""What runs reached, read from their folders: outcome, statistics over seeds, grouping, sums over rounds; each once."""
