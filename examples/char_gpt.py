"""A small GPT over characters, and text to train it on: the help texts of Python itself."""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional


class Attention(nn.Module):
    """Causal self-attention. The number of heads follows from the projections' width: ranks may have some heads each."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (project(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
                             for project in (self.query, self.key, self.value))
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(found.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and two dense layers, each with a layer norm before it and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.narrow(functional.gelu(self.wide(self.norm2(x))))


class CharGPT(nn.Module):
    """Predicts the next character: (batch, length) integers to (batch * length, characters) logits.

    It has 0.8 million parameters by default.
    """

    def __init__(self, characters: int, width: int = 128, heads: int = 4, layers: int = 4, context: int = 64) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.characters(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).flatten(0, 1))


class Text:
    """Python's help texts as numbers of characters: the first nine tenths to train on, the rest to validate.

    Attributes:
        alphabet: the different characters; a character's number is its place here.
        characters: how many there are.
    """

    def __init__(self, context: int = 64) -> None:
        text = "".join(topics[name] for name in sorted(topics))
        self.alphabet = "".join(sorted(set(text)))
        self.context, self.characters = context, len(self.alphabet)
        number_of = {character: number for number, character in enumerate(self.alphabet)}
        numbers = torch.tensor([number_of[character] for character in text])
        self._train, self._validate = numbers.split([len(numbers) * 9 // 10, len(numbers) - len(numbers) * 9 // 10])

    def batch(self, step: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets, (size, context) each. They depend on the step and the rank alone: a job can go on."""
        starts = torch.randint(len(self._train) - self.context, (size,),
                               generator=torch.Generator().manual_seed(1_000_003 * step + rank))
        return self._windows(self._train, starts)

    def validation(self, size: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the same inputs and targets on all ranks."""
        return self._windows(self._validate, torch.arange(size) * (len(self._validate) // (size + 1)))

    def _windows(self, numbers: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        taken = numbers[starts[:, None] + torch.arange(self.context + 1)]
        return taken[:, :-1], taken[:, 1:]


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of a batch, in nats a character."""
    return functional.cross_entropy(model(inputs), targets.flatten())
