"""Pictures of runs, one file per kind: numbers first, then drawing. matplotlib is loaded when something is drawn."""
