"""The models of the zoo: tiny random configurations of ``transformers``, a LoRA model of PEFT, and modules of torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from examples.zoo.data import CLASSES, LENGTH, WORDS

DROPOUT = 0.1
_SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}


def bert() -> Any:
    """BERT with a head for whole sequences."""
    from transformers import BertConfig, BertForSequenceClassification

    dropout = {"hidden_dropout_prob": DROPOUT, "attention_probs_dropout_prob": DROPOUT}
    config = BertConfig(
        vocab_size=WORDS, max_position_embeddings=LENGTH, num_labels=CLASSES, pad_token_id=0, **_SIZES, **dropout
    )
    return BertForSequenceClassification(config)


def gpt2() -> Any:
    """GPT-2 with its head for the next token, tied to the embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), DROPOUT)
    ends = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2, **ends, **dropout)
    )


def qwen() -> Any:
    """A Qwen model, in which two heads of queries share one of keys and values."""
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    config = Qwen3Config(
        vocab_size=WORDS, num_key_value_heads=1, head_dim=8, attention_dropout=DROPOUT, num_labels=CLASSES,
        pad_token_id=0, bos_token_id=1, eos_token_id=1, **_SIZES,
    )  # fmt: skip
    return Qwen3ForSequenceClassification(config)


def vit() -> Any:
    """A vision transformer."""
    from transformers import ViTConfig, ViTForImageClassification

    dropout = {"hidden_dropout_prob": DROPOUT, "attention_probs_dropout_prob": DROPOUT}
    return ViTForImageClassification(ViTConfig(image_size=16, patch_size=8, num_labels=CLASSES, **_SIZES, **dropout))


def resnet18() -> Any:
    """ResNet-18 with narrow layers."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=4, hidden_sizes=[4, 4, 8, 8], depths=[2, 2, 2, 2], layer_type="basic", num_labels=CLASSES
    )
    return ResNetForImageClassification(config)


def mobilenet() -> Any:
    """MobileNetV2 with narrow layers."""
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    config = MobileNetV2Config(image_size=32, depth_multiplier=0.1, num_labels=CLASSES, classifier_dropout_prob=DROPOUT)
    return MobileNetV2ForImageClassification(config)


def lora() -> Any:
    """BERT, frozen, with adapters of rank 2 and a head that is trained."""
    return with_adapters(bert())


def with_adapters(base: nn.Module) -> Any:
    """A classifier of transformers with adapters."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, lora_dropout=DROPOUT, target_modules=["query", "value"], modules_to_save=["classifier"])
    return get_peft_model(base, config)


class Reader(nn.Module):
    """An LSTM of two layers with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.layers = nn.LSTM(8, 8, num_layers=2, dropout=DROPOUT, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """The scores of the last state."""
        scores: Tensor = self.head(self.layers(self.words(x))[0][:, -1])
        return scores


class Encoder(nn.Module):
    """``nn.TransformerEncoder`` over padded sequences."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=DROPOUT, batch_first=True)
        self.words, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, CLASSES)
        self.layers = nn.TransformerEncoder(layer, 1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The scores of the first token."""
        states = self.layers(self.words(input_ids), src_key_padding_mask=attention_mask == 0)
        scores: Tensor = self.head(states[:, 0])
        return scores


class UNet(nn.Module):
    """Two scales, joined by a shortcut; one score per pixel and class."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = self._block(3, 4), self._block(4, 8)
        self.up, self.head = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Conv2d(8, 2, 1)
        self.pool = nn.MaxPool2d(2)

    @staticmethod
    def _block(channels: int, width: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1), nn.GroupNorm(2, width), nn.ReLU(), nn.Dropout2d(DROPOUT)
        )

    def forward(self, x: Tensor) -> Tensor:
        """The scores of every pixel."""
        fine = self.down(x)
        coarse = self.up(self.deep(self.pool(fine)))
        scores: Tensor = self.head(torch.cat([fine, coarse], 1))
        return scores


def mlp(inputs: int, classes: int) -> nn.Module:
    """A network of two layers for tables."""
    return nn.Sequential(nn.Linear(inputs, 8), nn.ReLU(), nn.Dropout(DROPOUT), nn.Linear(8, classes))


BUILDERS: dict[str, Any] = {
    "BERT": bert, "GPT-2": gpt2, "Qwen (grouped attention)": qwen, "ViT": vit, "ResNet-18": resnet18,
    "MobileNetV2": mobilenet, "LSTM": Reader, "nn.TransformerEncoder": Encoder, "BERT + LoRA": lora, "U-Net": UNet,
    "MLP": mlp,
}  # fmt: skip
"""The models by their names in the table."""
