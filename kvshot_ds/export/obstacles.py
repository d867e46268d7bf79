"""What of a drafter the engines that read a layout do not compute: named before anything is written, never left out in silence.

Read off the sources of vLLM, SGLang and speculators 0.9.0. Both engines build the first layer of EAGLE-3 for three hidden states, hand out
hidden states in ascending order of layers, and multiply a gate by silu. SGLang drops tensors whose names it does not know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from kvshot_ds.config import AnyDrafterConfig, DFlashConfig, HiddenOnlyConfig
from kvshot_ds.geometry import Geometry

Format = Literal["eagle3", "speculators", "dflash", "kvshot"]
FORMATS: tuple[Format, ...] = ("eagle3", "speculators", "dflash", "kvshot")


def obstacles(form: Format, config: AnyDrafterConfig, layers: tuple[int, ...], g: Geometry, draft_vocab_size: int) -> list[str]:
    """Each as `feature: why`; none if engines compute what this drafter does. layers: the fused ones, by their outputs."""
    if form == "kvshot":
        return []
    if form == "dflash":
        if not isinstance(config, DFlashConfig):
            return [f"family {config.family}: {_why_not(config, 'DFlash')}"]
        return [*_fused(layers, g), *_common(g), *_dflash(config, g, draft_vocab_size)]
    if not isinstance(config, HiddenOnlyConfig):
        return [f"family {config.family}: {_why_not(config, 'EAGLE-3')}"]
    found = [*_fused(layers, g), *_three(layers), *_common(g)]
    return [*found, *(_research(config, g) if form == "eagle3" else _speculators(g))]


def servable(config: AnyDrafterConfig, layers: tuple[int, ...], g: Geometry, draft_vocab_size: int) -> list[Format]:
    """The formats in which this drafter can be exported."""
    return [form for form in FORMATS if not obstacles(form, config, layers, g, draft_vocab_size)]


def _why_not(config: AnyDrafterConfig, layout: str) -> str:
    if isinstance(config, DFlashConfig | HiddenOnlyConfig):
        return f"the layout holds {layout} drafters alone"
    return "no engine reads the target's KV cache into a drafter; an engine would load the rest and propose wrongly"


def _fused(layers: tuple[int, ...], g: Geometry) -> list[str]:
    found = []
    if len(set(layers)) < len(layers):
        found.append(f"hidden_layers={list(layers)}: a layer stands there twice; engines hand out each once")
    if g.num_layers - 1 in layers:
        found.append(f"hidden_layers={list(layers)}: of the last layer, {g.num_layers - 1}, engines hand out the state after the final norm, or none")
    return found


def _three(layers: tuple[int, ...]) -> list[str]:
    return [] if len(layers) == 3 else [f"hidden_layers={list(layers)}: engines build fc for three hidden states, not for {len(layers)}"]


def _common(g: Geometry) -> list[str]:
    found = []
    if g.hidden_act != "silu":
        found.append(f"hidden_act={g.hidden_act}: engines compute silu alone")
    if g.rope.get("partial_rotary_factor", 1.0) != 1:
        found.append(f"partial_rotary_factor={g.rope['partial_rotary_factor']}: engines turn all of a head")
    return found


def _research(config: HiddenOnlyConfig, g: Geometry) -> list[str]:
    wrong: list[tuple[Callable[[], bool], str]] = [
        (lambda: config.depth > 1, f"depth={config.depth}: the layout has one layer, midlayer"),
        (lambda: config.fc_norm, "fc_norm: the layout has no place for it, and engines from before EAGLE-3.1 drop its norms without a word"),
        (lambda: config.norm_output, "norm_output: engines from before EAGLE-3.1 ignore it without a word"),
        (lambda: config.norm_before_residual, "norm_before_residual: SGLang ignores it without a word"),
        (lambda: g.qk_norm, "norms of queries and keys: the layout has no place for them, and SGLang drops them without a word"),
        (lambda: g.qkv_bias or g.o_bias, "biases of the attention: SGLang builds it without, and drops them without a word"),
        (lambda: g.mlp_bias, "biases of the MLP: SGLang builds it without, and drops them without a word"),
    ]
    return [text for is_so, text in wrong if is_so()] + _llama_width(g)


def _speculators(g: Geometry) -> list[str]:
    if g.qk_norm:
        return ["biases of the MLP beside norms of queries and keys: a qwen3 layer has no such biases"] if g.mlp_bias else []
    return _llama_width(g)


def _llama_width(g: Geometry) -> list[str]:
    fits = g.hidden_size % g.heads == 0
    return [] if fits else [f"{g.heads} heads on a width of {g.hidden_size}: the config of a llama layer must have a width that is a multiple of the heads"]


def _dflash(config: DFlashConfig, g: Geometry, draft_vocab_size: int) -> list[str]:
    wrong: list[tuple[bool, str]] = [
        (config.mask_token_id is None, "mask_token_id=null: the layout has no place for a trained mask embedding; train with a token of the target"),
        (draft_vocab_size != g.vocab_size, f"draft vocabulary of {draft_vocab_size}: engines propose from all {g.vocab_size} tokens of the target"),
        (not g.qk_norm, "no norms of queries and keys: the layers are those of Qwen3, which have them; only drafters of targets that have them fit"),
        (g.mlp_bias, "biases of the MLP: engines build it without"),
        (g.qkv_bias != g.o_bias, "biases of some projections of the attention: engines build all of them with biases, or none"),
    ]
    return [text for is_so, text in wrong if is_so]
