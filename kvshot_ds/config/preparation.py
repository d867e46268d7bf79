"""Options of kvshot prep: where conversations come from, how they are cleaned, rendered and answered."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from kvshot_ds.config.base import Section

Rule = Literal["mend", "refuse", "off"]


class SourceConfig(Section):
    """One source of conversations or prompts: a file, or a Hugging Face data set."""

    path: Path | None = Field(None, description="file to read: JSON, JSONL, Parquet, or text with one prompt a line; .gz, .xz and .zst are unpacked")
    dataset: str | None = Field(None, description="in place of path: id on the hub, or local folder, of a Hugging Face data set; read as a stream")
    dataset_name: str | None = Field(None, description="configuration of the data set, where it has several")
    split: str = Field("train", description="split of the data set")
    revision: str | None = Field(None, description="commit or tag of the data set")
    format: Literal["auto", "sharegpt", "ultrachat", "messages", "prompts"] = Field(
        "auto",
        description="sharegpt: {conversations: [{from, value}]}; ultrachat: {data: [user, assistant, ...]}; messages: {messages: [{role, content}], tools}; "
        "prompts: {prompt}, or one a line",
    )
    weight: float | None = Field(
        None, gt=0, description="share of this source in the mixture, against the weights of the others; null everywhere: all of every source"
    )

    @model_validator(mode="after")
    def _one_place(self) -> SourceConfig:
        if (self.path is None) == (self.dataset is None):
            raise ValueError("expected either path or dataset")
        return self


def _sources(sources: tuple[SourceConfig, ...]) -> tuple[SourceConfig, ...]:
    if len({s.weight is None for s in sources}) > 1:
        raise ValueError("expected a weight for every source, or for none")
    return sources


class CleaningConfig(Section):
    """What is done to conversations that are not fit to train on, in this order. Every rule is counted; dropped.jsonl lists what is dropped."""

    html: Rule = Field("mend", description="contents that are a rendered page (tags from end to end, no source code): mend turns them into text")
    empty_turns: Rule = Field(
        "mend",
        description="a turn without text: mend cuts the conversation before it (leaves it out, if it is the system's), refuse quarantines the conversation, "
        "off leaves it to the chat template; so for the rules below",
    )
    leading_assistant: Rule = Field("mend", description="assistant turns before the first user turn: mend drops them")
    repeated_roles: Rule = Field("mend", description="two turns of one role in a row: mend joins them with a blank line")
    languages: tuple[str, ...] = Field((), description="keep only conversations in these languages (ISO 639-1, such as en); empty: all")
    evaluation_sets: tuple[Path, ...] = Field((), description="files of evaluation prompts (any of the formats above, or {turns}, {question}, {prompt})")
    evaluation_ngram: int = Field(
        13,
        ge=0,
        description="drop conversations that share so many words in a row with an evaluation prompt (a shorter one: all of its words; below 5 words: all of a "
        "user turn); 0: keep them",
    )
    exact_duplicates: bool = Field(True, description="drop conversations with the same messages")
    near_duplicates: float = Field(0.8, ge=0, le=1, description="drop conversations whose word 5-grams have this Jaccard similarity (MinHash); 0: keep them")

    @model_validator(mode="after")
    def _duplicates(self) -> CleaningConfig:
        if self.near_duplicates and not self.exact_duplicates:
            raise ValueError("an exact duplicate is a near one: exact_duplicates=false needs near_duplicates=0")
        return self


class TemplateConfig(Section):
    """How a conversation is rendered, and what of it is supervised."""

    jinja: Path | None = Field(None, description="chat template in place of the tokenizer's own")
    thinking: bool | None = Field(None, description="enable_thinking, for templates that know it; null: the template's default")
    system: str | None = Field(None, description="system prompt of conversations that have none")
    supervise: Literal["all", "last"] = Field("all", description="assistant turns that are supervised")


class SynthesisConfig(Section):
    """Prompts the target writes itself from an empty user turn (Magpie, arXiv 2406.08464)."""

    count: int = Field(0, ge=0, description="prompts to synthesise")
    max_new_tokens: int = Field(64, ge=1, description="longest prompt [tokens]")
    temperature: float = Field(1.0, gt=0, description="sampling temperature")
    top_p: float = Field(0.95, gt=0, le=1, description="nucleus mass")


class EndpointConfig(Section):
    """An OpenAI-compatible server of the target (vLLM, SGLang)."""

    model: str | None = Field(None, description="name of the model there; null: the only one it serves")
    api_key_env: str = Field(
        "OPENAI_API_KEY", pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", description="environment variable that holds the key, if the server wants one"
    )
    concurrency: int = Field(64, ge=1, description="requests in flight")
    retries: int = Field(5, ge=0, description="tries after the first of a request that fails with a time-out, a broken connection or status 408, 409, 429, 5xx")
    timeout: float = Field(600, gt=0, description="longest wait for one answer [s]")


def _url(url: str | None) -> str | None:
    if url is not None:
        try:
            parts = urlsplit(url)
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0  # .port raises ValueError beyond 65535
        except ValueError:
            good = False
        if not good:
            raise ValueError("expected http://HOST:PORT/v1")
        if parts.username is not None or parts.password is not None:
            raise ValueError("expected no name and password in it: recipe.yaml would keep them; a key comes from the variable endpoint.api_key_env names")
    return url


class RegenerateConfig(Section):
    """Answers written by the target, so that the drafter learns the target's own distribution."""

    enabled: bool = Field(True, description="replace assistant turns by the target's own answers; prompts without answers need it")
    base_url: Annotated[str | None, AfterValidator(_url)] = Field(
        None, description="an OpenAI-compatible server of the target, such as http://127.0.0.1:8000/v1; null: the target is loaded into Ray workers"
    )
    endpoint: EndpointConfig = Field(default_factory=EndpointConfig, description="how the server at base_url is asked")
    max_new_tokens: int = Field(160, ge=1, description="longest answer [tokens]")
    temperature: float = Field(0.0, ge=0, description="0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus mass, when sampling")
    top_k: int = Field(0, ge=0, description="sample from so many best tokens; 0: from all")
    min_p: float = Field(0.0, ge=0, lt=1, description="sample from tokens with at least this share of the best one's probability")


class PrepConfig(Section):
    """Conversations or prompts in; cleaned, answered, tokenised conversations with an assistant mask out."""

    sources: Annotated[tuple[SourceConfig, ...], AfterValidator(_sources)] = Field((), description="where conversations come from")
    cleaning: CleaningConfig = Field(default_factory=CleaningConfig, description="what is not trained on")
    template: TemplateConfig = Field(default_factory=TemplateConfig, description="rendering and mask")
    synthesis: SynthesisConfig = Field(default_factory=SynthesisConfig, description="prompt synthesis")
    regenerate: RegenerateConfig = Field(default_factory=RegenerateConfig, description="answers by the target")
    max_conversations: int | None = Field(
        None,
        ge=1,
        description="keep so many conversations, those with the lowest hash: a smaller set lies within a larger one, whatever the order of the sources",
    )
    max_length: int = Field(2048, ge=8, description="longer conversations are cut here, kept if supervised tokens remain [tokens]")
    heldout_fraction: float = Field(0.1, ge=0, lt=1, description="share of conversations held out, chosen by a stable hash of the conversation")
    batch_size: int = Field(32, ge=1, description="sequences generated together, per worker")
    workers: int = Field(1, ge=1, description="Ray actors generating in parallel, each holding the target")
    cpus_per_worker: float = Field(1, gt=0, description="CPU cores of one worker")
    gpus_per_worker: float = Field(0, ge=0, description="GPUs of one worker")
    tokenizer_processes: int = Field(1, ge=1, description="processes that clean, render and tokenise")
    seed: int = Field(0, ge=0, lt=1 << 63, description="seed of sampling")

    @model_validator(mode="after")
    def _answers(self) -> PrepConfig:
        if not self.regenerate.enabled and (self.synthesis.count or any(s.format == "prompts" for s in self.sources)):
            raise ValueError("prompts have no answers: regenerate.enabled=false works only with conversations that have them, and synthesis.count=0")
        if self.regenerate.enabled and self.regenerate.max_new_tokens >= self.max_length:
            raise ValueError(f"regenerate.max_new_tokens={self.regenerate.max_new_tokens} leaves no room for a prompt within max_length={self.max_length}")
        if self.synthesis.count and any(source.weight is not None for source in self.sources):
            raise ValueError("a synthesised prompt has no share in a mixture: set weights, or synthesis.count")
        return self
