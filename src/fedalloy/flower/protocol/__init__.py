"""The messages between a server and its nodes, each read once against a strict schema before anything of it is used.

``header`` has the format's number and the JSON in front of every message, ``tensor_messages`` the tensors behind it,
``orders`` what a server may say (``plain_values`` in the arguments of rules) and ``replies`` what a node may answer.
The engine, the Strategy and the node use nothing else.
"""
