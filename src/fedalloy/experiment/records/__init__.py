"""The files of a run: records and checkpoints, written and read.

Nothing is imported here, so that reading a run or writing a recipe does not load torch.
"""
