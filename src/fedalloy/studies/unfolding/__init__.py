"""Deep unfolding: a table of weights is learned by differentiating the training loss through all rounds.

The function is ``fedalloy.unfold``; this room has another name, because a package of that name would hide it.
"""
