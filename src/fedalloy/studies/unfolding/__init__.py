"""Deep unfolding: a table of weights is learned by differentiating the training loss through all rounds.

The function is ``fedalloy.unfold``; this package has another name, because one of that name would hide it.
"""
