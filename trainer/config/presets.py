"""Model sizes by name, as in PaddleNLP, FleetX and minGPT. Data only."""

from __future__ import annotations

from trainer.named_tuple import NamedTuple

DEFAULT_VOCAB = 50304  # GPT-2's 50257 tokens, padded to a multiple of 128
DEFAULT_POSITIONS = 1024
GPT2_VOCAB = range(50257, 51201)  # its size as published, padded to any usual multiple
GPT2_END, CPM_END = 50256, 7  # the tokens at the end of a document


class Preset(NamedTuple):
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int = DEFAULT_VOCAB
    max_position_embeddings: int = DEFAULT_POSITIONS


PRESETS: dict[str, Preset] = {
    # PaddleNLP's and FleetX's names
    "gpt2-small-en": Preset(4, 1024, 4),
    "gpt2-en": Preset(12, 768, 12, 50257),
    "gpt2-medium-en": Preset(24, 1024, 16),
    "345M": Preset(24, 1024, 16),
    "gpt2-large-en": Preset(36, 1280, 20, 50257),
    "gpt2-xl-en": Preset(48, 1600, 25, 50257),
    "1.3B": Preset(24, 2048, 16),
    "6.7B": Preset(32, 4096, 32),  # FleetX's table of results says 4069, its configs 4096
    "13B": Preset(40, 5120, 40),  # as in FleetX; PaddleNLP has 128 heads
    "175B": Preset(96, 12288, 96, 51200),
    "gpt-cpm-large-cn": Preset(32, 2560, 32, 30000),
    "gpt-cpm-small-cn-distill": Preset(12, 768, 12, 30000),
    # minGPT's names; there the vocabulary usually comes from the data
    "openai-gpt": Preset(12, 768, 12, 50257),
    "gpt2": Preset(12, 768, 12, 50257),
    "gpt2-medium": Preset(24, 1024, 16, 50257),
    "gpt2-large": Preset(36, 1280, 20, 50257),
    "gpt2-xl": Preset(48, 1600, 25, 50257),
    "gopher-44m": Preset(8, 512, 16, 50257),
    "gpt-mini": Preset(6, 192, 6, 50257),
    "gpt-micro": Preset(4, 128, 4, 50257),
    "gpt-nano": Preset(3, 48, 3, 50257),
}
