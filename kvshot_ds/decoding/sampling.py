"""How the target's next token is chosen: filters, and noise that belongs to a position and to nothing else.

Noise is a function of (seed, sequence, absolute position, use), and of the token where every token needs its own. So it does
not depend on what is drafted, on the round, or on which other sequences are decoded beside it. Nor does the text, but for rejection: where a draft
ends decides which noise settles a token, and the longest draft of a batch is that of the sequence with the most room.

At temperature > 0 there are two lossless schemes. coupled (arXiv 2408.07978): the target takes the arg-max of its log-probabilities
plus Gumbel noise, the drafter the arg-max of its own plus the same noise. The text is then the target's alone, whatever is
drafted. rejection (arXiv 2211.17192): the drafter draws with noise of its own, `verify.reject` settles it.

The drafter's distribution is warped exactly as the target's, filters included, over the draft vocabulary. Both schemes stay lossless
with any q. If q was the target's own unfiltered distribution, a top_p filter on the target alone would have it
rejected in all the cases that the filter takes away; with the filter on both it would always be accepted.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

from kvshot_ds.config import SamplingConfig

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # splitmix64: the step between states, then the two factors of its mixing
_FACTORS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
_BITS = 48  # of a uniform number: fine enough for the tails, coarse enough that u * total < total in fp64
_AT_ONCE = 1 << 22  # noise made at a time [elements]: 32 MiB in fp64


class Use(IntEnum):
    """What noise is for; each use has its own, independent of the others at the same position."""

    CHOOSE = 0
    DRAFT = 1
    ACCEPT = 2
    OWN = 3


@dataclass(frozen=True)
class Drawn:
    """Drafted tokens [N], as target ids. probs [N, V_d] fp32: what they were drawn from; None if they are no draw that `verify.reject` could settle."""

    tokens: torch.Tensor
    probs: torch.Tensor | None


def warp(logits: torch.Tensor, config: SamplingConfig) -> torch.Tensor:
    """logits [..., V] -> fp32, divided by the temperature, -inf where a filter takes a token out. Temperature > 0.

    Each filter as transformers has it, in its order: top_k keeps ties with the last token it keeps; top_p drops the least likely
    tokens as long as they have at most 1 - top_p together, of equal ones those with the smaller ids first.
    """
    scores = logits.float()
    if config.temperature != 1:
        scores = scores / config.temperature
    if 0 < config.top_k < scores.shape[-1]:
        least = scores.topk(config.top_k).values[..., -1:]
        scores = scores.masked_fill(scores < least, float("-inf"))
    if config.top_p < 1:
        ascending, ids = scores.sort(stable=True)
        dropped = ascending.softmax(-1).cumsum(-1) <= 1 - config.top_p
        dropped[..., -1] = False
        scores = scores.masked_fill(torch.empty_like(dropped).scatter_(-1, ids, dropped), float("-inf"))
    if config.min_p > 0:
        probs = scores.softmax(-1)
        scores = scores.masked_fill(probs < config.min_p * probs.amax(-1, keepdim=True), float("-inf"))
    return scores


def log_probs(logits: torch.Tensor, config: SamplingConfig) -> torch.Tensor:
    """What the target's next token is drawn from: logits [..., V] -> log-probabilities in fp32. Temperature > 0."""
    return warp(logits, config).log_softmax(-1)


def mixed(x: torch.Tensor) -> torch.Tensor:
    """int64 [...] -> int64 [...]: the output function of splitmix64, a bijection whose values look independent."""
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        x = (x ^ _shifted(x, shift)) * factor
    return x ^ _shifted(x, 31)


def keys(seed: int, use: Use, sequences: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One int64 for each (seed, use, sequence, position). sequences and positions broadcast against each other."""
    key = mixed(sequences * _GOLDEN + _wrapped(seed * _FACTORS[0] + use * _FACTORS[1]))
    return mixed(key + positions * _GOLDEN)


def uniform(bits: torch.Tensor) -> torch.Tensor:
    """int64 [...] -> fp64 [...], inside (0, 1) without its ends."""
    return (_shifted(bits, 64 - _BITS).double() + 0.5) * 2.0**-_BITS


def gumbel(key: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise of the tokens `ids` [V] under each key [R]: [R, V] fp64. fp32 would make the largest values, which win, collide."""
    return uniform(mixed(key.unsqueeze(-1) + (ids + 1) * _GOLDEN)).log_().neg_().log_().neg_()


def perturbed_best(scores: torch.Tensor, key: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Gumbel-max: an index of each row of scores [R, V] (log-probabilities up to a constant), drawn with the noise of the tokens `ids` [V] under key [R]."""
    rows = max(1, _AT_ONCE // scores.shape[-1])
    parts = zip(scores.split(rows), key.split(rows), strict=True)
    return torch.cat([(gumbel(k, ids) + s).argmax(-1) for s, k in parts]) if len(scores) else scores.argmax(-1)


def pick(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """An index of each row of weights [R, V] >= 0, with a probability proportional to them, by the uniform numbers u [R]."""
    sums = weights.double().cumsum(-1)
    at = torch.searchsorted(sums, u.unsqueeze(-1) * sums[..., -1:], right=True).squeeze(-1)
    return at.clamp_(max=weights.shape[-1] - 1)


class Sampler:
    """`SamplingConfig` put to work. Positions are those of the tokens that are chosen, counted from the first token of the prompt;
    sequences tell apart what is decoded with one seed. Nothing here makes the host wait for the device."""

    def __init__(self, config: SamplingConfig):
        self.config = config

    @property
    def greedy(self) -> bool:
        return self.config.greedy

    @property
    def draws(self) -> bool:
        """Whether the tokens of a chain are draws that `verify.reject` settles."""
        return not self.greedy and self.config.scheme == "rejection"

    def choose(self, logits: torch.Tensor, positions: torch.Tensor, sequences: torch.Tensor) -> torch.Tensor:
        """The target's tokens [B, n], whatever is drafted. logits [B, n, V], positions [B, n], sequences [B]."""
        if self.greedy:
            return logits.argmax(-1)
        key = keys(self.config.seed, Use.CHOOSE, sequences.unsqueeze(-1), positions)
        ids = torch.arange(logits.shape[-1], device=logits.device)
        return perturbed_best(warp(logits.flatten(0, 1), self.config), key.flatten(), ids).view(key.shape)

    def draw(self, logits: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor, sequences: torch.Tensor) -> Drawn:
        """One drafted token for each of N rows. logits [N, V_d] over the draft vocabulary `ids` [V_d]; positions, sequences [N]."""
        if self.greedy:
            return Drawn(ids[logits.argmax(-1)], None)
        scores = warp(logits, self.config)
        if self.config.scheme == "coupled":
            return Drawn(ids[perturbed_best(scores, keys(self.config.seed, Use.CHOOSE, sequences, positions), ids)], None)
        probs = scores.softmax(-1)
        return Drawn(ids[pick(probs, self.uniform(positions, sequences, Use.DRAFT))], probs)

    def uniform(self, positions: torch.Tensor, sequences: torch.Tensor, use: Use) -> torch.Tensor:
        """Uniform numbers in (0, 1), fp64, for positions and sequences that broadcast against each other."""
        return uniform(keys(self.config.seed, use, sequences, positions))

    def log_probs(self, logits: torch.Tensor) -> torch.Tensor:
        return log_probs(logits, self.config)


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """Logical shift right of int64, whose own is arithmetic."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _wrapped(n: int) -> int:
    """The int64 with the last 64 bits of n."""
    return (n + (1 << 63)) % (1 << 64) - (1 << 63)
