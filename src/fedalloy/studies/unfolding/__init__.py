"""Deep unfolding: learn a table of weights by differentiating the training loss through all rounds.

The function is ``fedalloy.unfold``; the package has another name because a module ``unfold`` would shadow it.
"""
