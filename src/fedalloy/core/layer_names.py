"""Which layer a leaf belongs to, by its name. Imports no torch, because readers of records use it too."""

from __future__ import annotations

import re

_KINDS = (
    "lora|adamss|boft|delora|frod|glora|gralora|hada|hira|ia3|lokr|oft|poly_lora|pvera|randlora|supertuning|vblora|vera"
)
_ADAPTER = re.compile(rf"(.+)\.({_KINDS})_\w+\.([^.]+)(\.weight|\.bias)?")
"""Leaves of PEFT's adapters: the adapted layer, the kind of adapter, its name."""


def layer_of(leaf: str) -> str:
    """The module a leaf belongs to: its name up to the last dot, so weight and bias go together; so do the matrices of
    one adapter of PEFT, whose product is what changes the layer.

    >>> layer_of("body.0.weight"), layer_of("scale")
    ('body.0', 'scale')
    >>> {layer_of(f"query.{leaf}.default.weight") for leaf in ("lora_A", "lora_B")}
    {'query.lora.default'}
    """
    adapter = _ADAPTER.fullmatch(leaf)
    if adapter is not None:
        return ".".join(adapter.group(1, 2, 3))
    return leaf.rpartition(".")[0] or leaf
