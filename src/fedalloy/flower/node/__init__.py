"""How a node carries out an order: its policy, its limits, its data, its store, and the answer. Nothing is sent here.

``answer`` reads an order, checks it and carries it out; ``policy`` and ``limits`` define what is never sent and what is
never done, ``data`` reads the node's own examples, ``leaves`` completes the model, and ``store`` keeps the client
state.
"""
