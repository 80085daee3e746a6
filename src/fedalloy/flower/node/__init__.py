"""What a node does with an order: its policy, its limits, its data, what it keeps, and the answer. Nothing here sends.

``answer`` reads an order, checks it and carries it out; ``policy`` and ``limits`` say what is never given away and what
is never done, ``data`` reads the node's own examples, ``leaves`` completes the model, and ``store`` keeps what stays.
"""
