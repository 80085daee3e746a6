"""The model and the data of the example, which its nodes import by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

CLASSES, LENGTH, WORDS = 3, 6, 32
SIZES = (18, 25)
MODEL = "examples.adapters.model:adapters"


def adapters() -> Any:
    """A tiny BERT, frozen, with adapters of rank 2 and a head that is trained. A real one would be loaded by
    ``from_pretrained``, on the server and on every node."""
    from peft import LoraConfig, get_peft_model
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    base = BertForSequenceClassification(
        BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, num_labels=CLASSES, pad_token_id=0, **sizes)
    )
    config = LoraConfig(r=2, lora_dropout=0.1, target_modules=["query", "value"], modules_to_save=["classifier"])
    return get_peft_model(base, config)


def write_share(folder: Path, client: int) -> None:
    """The examples of one client: padded sequences of tokens with their mask, whose class is that of the first one."""
    draw = np.random.default_rng(client)
    mask = np.arange(LENGTH) < draw.integers(2, LENGTH + 1, (SIZES[client], 1))
    tokens = np.where(mask, draw.integers(1, WORDS, (SIZES[client], LENGTH)), 0)
    folder.mkdir(parents=True, exist_ok=True)
    whole = mask.astype(np.int64)
    np.savez(folder / f"{client}.npz", input_ids=tokens, attention_mask=whole, y=tokens[:, 0] % CLASSES)


def recipe(method: str, dataset: dict[str, Any], clients: int | None, engine: dict[str, Any]) -> dict[str, Any]:
    """The tables of a run of two rounds."""
    return {
        "task": {"dataset": dataset, "model": MODEL, "buckets": [4]},
        "partition": {} if clients is None else {"clients": clients},
        "algorithm": {"name": method, "lr": 0.1, "batch_size": 4},
        "run": {"rounds": 2, "seeds": [5]},
        "evaluate": {"every": 2, "clients": 2},
        "engine": engine,
    }


def on_nodes(method: str, deadline: float = 600.0) -> dict[str, Any]:
    """The recipe of a federation, whose server knows only the form of the data."""
    shape = {"input_ids": [LENGTH], "attention_mask": [LENGTH]}
    form = {"kind": "nodes", "shape": shape, "classes": CLASSES}
    patience = {"deadline": deadline, "minimum": len(SIZES), "wait": deadline}
    return recipe(method, form, len(SIZES), {"kind": "flower", **patience})


def simulated(method: str, folder: Path, engine: str = "loop") -> dict[str, Any]:
    """The same with the data of all clients in a folder."""
    for client in range(len(SIZES)):
        write_share(folder, client)
    return recipe(method, {"kind": "folder", "path": str(folder)}, None, {"kind": engine})
