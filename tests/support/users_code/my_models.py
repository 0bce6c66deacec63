"""A model of a user's own: GPT-2's blocks, with positions, biases and LayerNorm."""

from torch import Tensor, arange, nn
from torch.nn import functional as F

from stages.config.run_config import ModelConfig


class Embedding(nn.Module):
    """Tokens (batch, context) -> activations (batch, context, width)."""

    def __init__(self, config: ModelConfig, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(context, config.width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions(arange(tokens.shape[1], device=tokens.device))


class Block(nn.Module):
    """Activations -> activations."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.project = nn.Linear(config.width, 3 * config.width)
        self.mix = nn.Linear(config.width, config.width)
        self.up, self.down = (
            nn.Linear(config.width, config.mlp_width),
            nn.Linear(config.mlp_width, config.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.project(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


def gpt2_like(config: ModelConfig, context: int) -> tuple[nn.Module, list[nn.Module], nn.Module]:
    head = nn.Sequential(nn.LayerNorm(config.width), nn.Linear(config.width, config.vocab_size, bias=False))
    return Embedding(config, context), [Block(config) for _ in range(config.layers)], head
