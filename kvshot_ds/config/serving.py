"""Options of everything that decodes: kvshot decode, kvshot bench, kvshot serve, and the serving check of kvshot eval."""

from __future__ import annotations

from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from kvshot_ds.config.base import Dtype, Section

_MOST_NODES = 512  # of a draft tree
_LEAST_TEMPERATURE = 1e-6


def _not_too_small(temperature: float) -> float:
    if 0 < temperature < _LEAST_TEMPERATURE:
        raise ValueError(f"expected 0 (greedy) or at least {_LEAST_TEMPERATURE:g}: logits over less than that leave the range of fp32")
    return temperature


Temperature = Annotated[float, Field(ge=0), AfterValidator(_not_too_small)]


class SamplingConfig(Section):
    """How the target's next token is chosen. Filters apply to the target's distribution, in this order: temperature, top_k, top_p, min_p."""

    temperature: Temperature = Field(0.0, description=f"0: greedy; else at least {_LEAST_TEMPERATURE:g}")
    top_k: int = Field(0, ge=0, description="keep the most likely tokens only; 0 keeps all")
    top_p: float = Field(1.0, gt=0, le=1, description="keep the smallest set of most likely tokens that has at least this probability")
    min_p: float = Field(0.0, ge=0, le=1, description="keep tokens at least this likely, relative to the most likely one")
    seed: int = Field(0, ge=0, lt=1 << 63, description="seed of the noise: the same seed gives the same text, with rejection in the same batch")
    scheme: Literal["rejection", "coupled"] = Field(
        "rejection",
        description="how sampled drafts are settled, losslessly. rejection: accept with min(1, p/q), else the residual (arXiv 2211.17192), accepts most; "
        "coupled: drafter and target choose with the same noise at each position, so that the text is the one the target alone gives with that seed. "
        "Trees, whose drafts are not drawn, are always settled by the latter",
    )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


class DraftingConfig(Section):
    """What a round proposes. A chain is one token after another; a tree has several candidates for a position."""

    strategy: Literal["chain", "static_tree", "dynamic_tree", "paper_tree"] = Field(
        "chain",
        description="chain; static_tree: drafting.branching candidates a level; dynamic_tree: the drafting.nodes candidates with the highest joint draft "
        "probability, of drafting.top_k expanded at each level (EAGLE-2, arXiv 2406.16858), for block-wise drafters best-first over their marginals (DDTree, "
        "arXiv 2604.12989); paper_tree: dynamic_tree with depth 8, top-k 10, 60 nodes",
    )
    length: int = Field(7, ge=1, le=64, description="tokens proposed by a chain, levels of a tree; a block-wise drafter proposes no more than its block holds")
    min_confidence: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="a chain stops before a token of a lower joint draft probability; costs one wait for the device each step. 0: never",
    )
    branching: tuple[int, ...] = Field((4, 2, 2, 1, 1), min_length=1, description="static_tree: candidates after each node of level 1, 2, …")
    top_k: int = Field(10, ge=1, le=64, description="dynamic_tree: nodes expanded at each level, and candidates after each of them")
    nodes: int = Field(60, ge=1, le=_MOST_NODES, description="dynamic_tree: nodes that the target verifies")

    @model_validator(mode="after")
    def _positive(self) -> DraftingConfig:
        if min(self.branching) < 1:
            raise ValueError("drafting.branching: expected at least one candidate at each level")
        if self.static_nodes > _MOST_NODES:
            found = f"{list(self.branching)} makes a tree of {self.static_nodes} nodes"
            raise ValueError(f"drafting.branching: {found}; expected at most {_MOST_NODES}, as the target verifies all of them in each round")
        return self

    @property
    def static_nodes(self) -> int:
        """Nodes of a static tree: the sum over its levels of the product of the candidates up to there."""
        return sum(accumulate(self.branching, mul))


class DecodeConfig(Section):
    """Real speculative decoding on held-out prompts, checked against the target's own generate."""

    drafters: tuple[Path, ...] = Field((), description="run folders or exported drafter folders; empty means this recipe's own run")
    max_prompts: int = Field(20, ge=1, description="held-out prompts decoded")
    max_new_tokens: int = Field(64, ge=1, description="tokens generated for each prompt [tokens]")
    batch: int = Field(1, ge=1, description="prompts decoded together")
    drafting: DraftingConfig = Field(default_factory=DraftingConfig, description="what a round proposes")
    sampling: SamplingConfig = Field(default_factory=SamplingConfig, description="how the target's next token is chosen")
    dtype: Dtype = Field("fp32", description="dtype of target and drafter while decoding; the token-for-token check is exact in fp32")


class LatencyConfig(Section):
    """What `kvshot bench --latency` measures: the table that the cost model and `bench.simulate` read."""

    contexts: tuple[Annotated[int, Field(ge=1)], ...] = Field((128, 512, 1024), min_length=1, description="positions before the new tokens [tokens]")
    widths: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (1, 2, 4, 8, 16, 32, 61), min_length=1, description="new tokens of a target forward; 1 must be among them, and one more than the largest tree has nodes"
    )
    positions: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (1, 2, 4, 8, 16), min_length=1, description="positions that draft step 0 takes in; 1 must be among them, and one more than the longest chain has tokens"
    )
    rows: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (1, 4, 10, 16), min_length=1, description="rows of a later draft step; 1 (a chain) must be among them, and the most nodes a tree expands at a level"
    )
    repeats: int = Field(7, ge=1, description="timings of each point, in alternating order; the median counts")
    warm_up: int = Field(2, ge=0, description="times that each point is run before it is timed")

    @model_validator(mode="after")
    def _from_one(self) -> LatencyConfig:
        for name in ("widths", "positions", "rows"):
            if 1 not in getattr(self, name):
                raise ValueError(f"bench.latency.{name}: expected 1 among them")
        return self


class BenchConfig(Section):
    """Speed of drafters against the target alone, prompt-lookup and assisted generation, in one process. What is decoded how follows from `decode`."""

    drafters: tuple[Path, ...] = Field((), description="run folders or exported drafter folders; empty means this recipe's own run")
    heldout: bool = Field(True, description="prompts of the held-out conversations of work/prepared")
    mt_bench: Path | None = Field(None, description="question.jsonl of MT-Bench (first turns)")
    humaneval: Path | None = Field(None, description="HumanEval.jsonl or HumanEval.jsonl.gz")
    gsm8k: Path | None = Field(None, description="JSONL of GSM8K problems, {question, answer} or {prompt, expected}")
    ifbench: Path | None = Field(None, description="IFBench_test.jsonl")
    prompts: tuple[Path, ...] = Field((), description="any JSONL of {prompt: text} or {messages: [...]}")
    max_prompts: int = Field(20, ge=2, description="prompts of each source, in file order")
    max_new_tokens: int = Field(128, ge=1, description="tokens generated for each prompt [tokens]")
    prompt_lookup: bool = Field(True, description="compare with the prompt-lookup decoding of transformers")
    prompt_lookup_tokens: int = Field(10, ge=1, description="tokens that prompt-lookup decoding proposes (prompt_lookup_num_tokens of transformers)")
    assistant: Path | None = Field(None, description="Hugging Face folder of a small model of the same tokenizer: compare with assisted generation")
    repeats: int = Field(1, ge=1, description="times each prompt is decoded by each method, order alternating; the median counts")
    warm_up: int = Field(1, ge=0, description="prompts decoded by every method before anything is timed")
    overlap: Literal["refuse", "drop", "warn"] = Field(
        "refuse",
        description="a question that stands in the training data of a drafter: refuse ends with an error that names it, drop leaves it out and lists it, "
        "warn asks it and says so",
    )
    predict: bool = Field(
        True, description="measure latencies at the mean context of the run, and set the speed-up that the cost model predicts beside the measured"
    )
    dtype: Dtype = Field("fp32", description="dtype of target and drafters")
    threads: int | None = Field(None, ge=1, description="CPU threads of torch; null leaves them as they are")
    simulate: Path | None = Field(None, description="latency table of another accelerator (kvshot bench --latency writes one): predict instead of measuring")
    simulate_context: int | None = Field(None, ge=1, description="mean context that bench.simulate predicts for [tokens]; null: the middle one of the table")
    latency: LatencyConfig = Field(default_factory=LatencyConfig, description="what kvshot bench --latency measures")


class ServeConfig(Section):
    """A small OpenAI-compatible HTTP server over one drafter, for trying it by hand. How it decodes follows from `decode.drafting`; what a
    request leaves out of its sampling, from `decode.sampling`; how a chat is rendered, from `prep.template`."""

    drafter: Path | None = Field(None, description="run folder or exported drafter folder; null means this recipe's own run")
    host: str = Field("127.0.0.1", description="address listened on; anything else lets other machines in")
    port: int = Field(8010, ge=0, le=65535, description="port; 0 takes a free one")
    api_key: str | None = Field(None, min_length=1, description="key that clients must send; null asks for none")
    max_new_tokens: int = Field(1024, ge=1, description="most tokens of one answer; a request for more gets status 400 [tokens]")
    max_waiting: int = Field(16, ge=0, description="requests that may wait while one is answered; further ones get status 429")
    max_body: int = Field(1 << 20, ge=1024, description="largest request [bytes]")
    timeout: float = Field(600.0, gt=0, description="longest time for one answer, waiting included; then it gets status 504 [s]")
    grace: float = Field(30.0, ge=0, description="time that answers under way have to finish when the server is stopped [s]")
    dtype: Dtype = Field("fp32", description="dtype of target and drafter")
