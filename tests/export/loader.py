"""Runs where speculators is installed, without this project: loads exports as the tools around serving engines do, and says what it found.

    python loader.py JOBS.json OUT.json

A job is an object: {"do": "load", "folder", "inputs", "logits"}: a speculators export, and its logits on the tensors in `inputs`, written to `logits`;
{"do": "eagle3" or "dflash", "folder", "target", "converted"}: an export in the research or the original DFlash layout through speculators' converter.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.convert.dflash.converter import DFlashConverter
from speculators.convert.eagle.eagle3_converter import Eagle3Converter


def loaded(folder: str) -> tuple[Any, dict[str, Any]]:
    """The model with its target's weights; keys that transformers' loader and torch's miss or do not know; tensors that nobody filled."""
    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    kind: Any = SpeculatorModel.registered_model_class_from_config(config)
    info = super(SpeculatorModel, kind).from_pretrained(folder, config=config, output_loading_info=True)[1]
    model = SpeculatorModel.from_pretrained(folder, config=config).eval()
    nan = sorted(name for name, x in model.state_dict().items() if x.is_floating_point() and not bool(x.isfinite().all()))
    strict = model.load_state_dict(load_file(Path(folder) / "model.safetensors"), strict=False)
    found = {name: sorted(map(str, info[f"{name}_keys"])) for name in ("missing", "unexpected", "mismatched")}
    absent = sorted(name for name in strict.missing_keys if not name.startswith("verifier_"))
    return model, found | {"class": kind.__name__, "absent": absent, "unknown": strict.unexpected_keys, "nan": nan, "layer_ids": model.target_layer_ids}


def load(job: dict[str, str]) -> dict[str, Any]:
    model, found = loaded(job["folder"])
    given = load_file(job["inputs"])
    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, args, output: logits.append(output[0]))
    with torch.no_grad():
        documents = torch.zeros(1, len(given["tokens"]), dtype=torch.int64)
        model(given["hidden"][None], given["tokens"][None], documents, ttt_steps=int(given["steps"]))
    save_file({"logits": torch.stack(logits)}, job["logits"])
    return found


def convert(job: dict[str, str]) -> dict[str, Any]:
    if job["do"] == "eagle3":
        ids = json.loads((Path(job["folder"]) / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"]
        Eagle3Converter().convert(job["folder"], job["converted"], job["target"], validate=False, eagle_aux_hidden_state_layer_ids=ids)
    else:
        DFlashConverter().convert(job["folder"], job["converted"], job["target"])
    return loaded(job["converted"])[1]


def outcome(job: dict[str, str]) -> dict[str, Any]:
    """What a job found, or its error, of whatever kind: the test of that job shows it."""
    try:
        return load(job) if job["do"] == "load" else convert(job)
    except Exception as error:  # noqa: BLE001
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    torch.set_num_threads(1)
    jobs, out = sys.argv[1:]
    Path(out).write_text(json.dumps([outcome(job) for job in json.loads(Path(jobs).read_text())]))
