"""The heart of the house: types, protocols, the algorithm and its two halves. Imports torch and nothing else."""
