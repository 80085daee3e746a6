"""The messages between a server and its nodes, each checked once against a strict schema before it is used.

``header`` has the format number and the JSON header of every message, ``tensor_messages`` the tensors after it,
``orders`` what a server may send (``plain_values`` in the arguments of rules) and ``replies`` what a node may answer.
The engine, the Strategy and the node use nothing else.
"""
