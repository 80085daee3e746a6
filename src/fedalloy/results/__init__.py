"""Results of runs, read from their folders: outcomes, statistics over seeds, grouping, sums over rounds."""
