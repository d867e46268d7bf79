"""Batched generation with the target: greedy, or sampled from the nucleus.

Plain `model.generate` on batches of like length. A loop of our own, with keys and values written in place, no repeated
heads and ended rows leaving the batch, wrote the same tokens 1.17 times as fast on CPU (fp32, batch 64): most of a step
are matrix products, so it was left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from data_prep.chat import ChatTemplate
from kvshot_ds.target import Target


class Nucleus:
    """Logits processor: temperature, then the smallest set of tokens with mass >= top_p (arXiv 1904.09751).

    transformers' own sorts the whole vocabulary of every row, which on CPU costs as much as the forward; here most rows
    are decided by their few hundred best tokens.
    """

    def __init__(self, temperature: float, top_p: float, width: int = 512) -> None:
        self.temperature, self.top_p, self.width = temperature, top_p, width

    def __call__(self, _tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """scores [B, V] -> [B, V]: over the temperature, and minus infinity outside the nucleus."""
        scores = scores / self.temperature
        if self.top_p >= 1:
            return scores
        total, width = scores.logsumexp(-1, keepdim=True), self.width
        while True:
            top, index = scores.topk(min(width, scores.shape[-1]))  # [B, width]
            mass = (top - total).exp()
            if width >= scores.shape[-1] or bool((mass.sum(-1) >= self.top_p).all()):
                break
            width *= 8
        top = top.masked_fill(mass.cumsum(-1) - mass >= self.top_p, float("-inf"))
        return torch.full_like(scores, float("-inf")).scatter(-1, index, top)


class Generator:
    """Batched generation with one target. Stops at any special token: none of them belongs inside an answer."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.template = ChatTemplate(target.tokenizer)
        # a folder's generation defaults (repetition penalty, top-k) are not the distribution a drafter has to learn
        target.model.generation_config = GenerationConfig()

    def answers(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0, batch_size: int = 32
    ) -> list[list[int]]:
        """The continuation of each prompt, in order. temperature 0 is greedy.

        An answer ends with the end-of-turn token if the target wrote it, and without one if it reached `max_new_tokens` or
        stopped at another special token. The same call gives the same answers, whatever was drawn before.
        """
        options: dict[str, Any] = {"generation_config": self._config(max_new_tokens, sample=temperature > 0)}
        if temperature > 0:
            options["logits_processor"] = [Nucleus(temperature, top_p)]
        order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))
        found: dict[int, list[int]] = {}
        device = self.target.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.inference_mode():
            torch.manual_seed(seed)
            for at in range(0, len(order), batch_size):
                rows = order[at : at + batch_size]
                width = len(prompts[rows[-1]])
                tokens = torch.full((len(rows), width), self.template.end_id)  # [B, N], padded on the left
                mask = torch.zeros_like(tokens)
                for row, i in enumerate(rows):
                    tokens[row, width - len(prompts[i]) :] = torch.as_tensor(prompts[i])
                    mask[row, width - len(prompts[i]) :] = 1
                out = self.target.model.generate(tokens.to(device), attention_mask=mask.to(device), **options)
                found.update(zip(rows, map(self._ended, out[:, width:].tolist()), strict=True))
        return [found[i] for i in range(len(prompts))]

    def _config(self, max_new_tokens: int, sample: bool) -> GenerationConfig:
        config = GenerationConfig(
            max_new_tokens=max_new_tokens, do_sample=sample, eos_token_id=sorted(self.template.special_ids), pad_token_id=self.template.end_id
        )
        if sample:  # Nucleus does it all
            config.update(temperature=1.0, top_p=1.0, top_k=0)
        return config

    def _ended(self, answer: list[int]) -> list[int]:
        """`answer` up to its first special token, which stays if it is the end of the turn."""
        stop = next((i for i, token in enumerate(answer) if token in self.template.special_ids), None)
        return answer if stop is None else answer[: stop + (answer[stop] == self.template.end_id)]
