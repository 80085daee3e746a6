"""What a run leaves on disk: records, checkpoints, and how they are read again.

Nothing is imported here, so that reading a run or writing a recipe does not load torch.
"""
