"""The model card of an exported drafter: README.md, for the person who finds the folder."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from kvshot_ds.drafters.build import DrafterInfo
from kvshot_ds.export.facts import UNKNOWN
from kvshot_ds.export.obstacles import Format

_LAYOUT: dict[Format, str] = {
    "eagle3": "the EAGLE-3 research layout (LlamaForCausalLMEagle3), which SGLang and vLLM read",
    "speculators": "the layout of speculators (Eagle3Speculator), which vLLM reads",
    "dflash": "the original DFlash layout (DFlashDraftModel), which vLLM and SGLang read",
    "kvshot": "the format of kvshot-ds. No serving engine reads it: kvshot decode, eval, bench and serve do, and the Python below",
}


def card(form: Format, info: DrafterInfo, facts: Mapping[str, Any], parameters: int, dtype: str, named: str | None) -> str:
    """README.md: front matter and sections. named: the target as the config names it. What is not known is said to be unknown."""
    front = ["---", "library_name: kvshot-ds", "tags:", "- speculative-decoding", f"- {info.config.family}"]
    target = named or info.target_name
    parts = [
        "\n".join([*front, "---"]),
        f"# A drafter for {info.target_name}",
        f"A draft model for speculative decoding: family `{info.config.family}`, depth {info.config.depth}, {parameters / 1e6:.1f} M parameters in {dtype}, "
        f"draft vocabulary of {info.draft_vocab_size:,} of {info.geometry.vocab_size:,} tokens. It is of use with its target alone: `{info.target_name}`, "
        f"sha256 of config and weights {info.target_digest}. Written in {_LAYOUT[form]}.",
        _use(form, info, target),
        _training(info, facts),
        _measured(facts.get("evaluation")),
        f"## Licence\n\nOf the target: {facts.get('target_license', UNKNOWN)}. The drafter was made from its states and answers.",
    ]
    return "\n\n".join(parts) + "\n"


def _use(form: Format, info: DrafterInfo, target: str) -> str:
    if form == "kvshot":
        code = [
            "import kvshot_ds",
            "",
            'drafter = kvshot_ds.load_drafter("this/folder")',
            "drafter.bind(model.get_input_embeddings().weight, model.get_output_embeddings().weight)  # model: the target, from transformers",
        ]
        return "## Use\n\n" + _block("python", code) + "\n\n" + _block("", ["kvshot decode RECIPE decode.drafters=[this/folder]"])
    method = "dflash" if form == "dflash" else "eagle3"
    count = getattr(info.config, "block_size", 4) - 1
    speculation = f'{{"method": "{method}", "model": "this/folder", "num_speculative_tokens": {count}}}'
    return "## Use\n\n" + _block("", [f"vllm serve {shlex.quote(target)} --speculative-config '{speculation}'"])


def _block(language: str, lines: list[str]) -> str:
    return "\n".join([f"```{language}", *lines, "```"])


def _training(info: DrafterInfo, facts: Mapping[str, Any]) -> str:
    training, data = info.extra.get("training") or {}, facts.get("data")
    imported = info.extra.get("imported")
    lines = []
    if imported:
        lines.append(f"- imported from {imported.get('source')} ({imported.get('layout') or imported.get('format')}), not trained here")
    if data:
        made = f", and {data['synthetic_prompts']:,} prompts that the target wrote" if data.get("synthetic_prompts") else ""
        lines.append(f"- data: {', '.join(data['sources']) or 'no sources named'}{made}; answers: {data['answers']}")
    elif not imported:
        lines.append("- data: unknown; the drafter was exported without its run")
    counts = [
        f"{training[name]:,} {what}" for name, what in (("steps", "steps"), ("supervised_rows", "supervised rows"), ("tokens", "tokens")) if name in training
    ]
    if counts:
        lines.append(f"- {', '.join(counts)}; start: {(training.get('init') or {}).get('layers', 'unknown')}")
    if facts.get("command"):
        commit = f", commit {facts['git_commit']}" if facts.get("git_commit") else ""
        lines.append(f"- command: `{shlex.join(map(str, facts['command']))}`{commit}")
    elif not imported:
        lines.append("- command: unknown")
    return "## Training\n\n" + "\n".join(lines)


def _measured(evaluation: Mapping[str, Any] | None) -> str:
    if not evaluation:
        return "## Held-out acceptance\n\nNot measured: there was no eval.json beside the drafter."
    conversations = (evaluation.get("data") or {}).get("conversations")
    share = evaluation.get("confidence", 0.95)
    rows = [(f"α_{a['k']}", a) for a in evaluation.get("alpha") or ()]
    retention = f"retention {rows[-1][0]} / α_0" if rows else "retention"
    rows += [(name, evaluation[key]) for name, key in (("MAT", "mat"), ("joint MAT", "mat_joint"), (retention, "retention")) if key in evaluation]
    table = ["| metric | value | interval |", "|---|---|---|", *(f"| {name} | {_number(v.get('value'))} | {_ends(v)} |" for name, v in rows)]
    told = f"On {conversations} held-out conversations; intervals hold {share:.0%} over conversations. α_k: share of rows whose proposal k is the target's."
    return "## Held-out acceptance\n\n" + told + "\n\n" + "\n".join(table)


def _number(value: Any) -> str:
    return "–" if value is None else f"{value:.3f}"


def _ends(value: Mapping[str, Any]) -> str:
    return "–" if value.get("low") is None else f"[{value['low']:.3f}, {value['high']:.3f}]"
