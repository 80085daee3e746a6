"""Pictures of runs, one file per kind: each computes numbers, then draws. matplotlib is loaded when something is
drawn."""
