"""Drafter folders: what is saved is what is loaded, to the bit; what does not fit is refused by name."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvshot_ds.drafters.build import DrafterInfo, build_drafter, find_drafter, load_drafter, save_drafter
from kvshot_ds.errors import ConfigError, KvshotError
from tests import toys


@pytest.fixture(params=toys.FAMILIES)
def saved(request, tmp_path):
    drafter = toys.drafter(request.param, toys.geometry("qwen3"), torch.float32)
    info = DrafterInfo(toys.FAMILIES[request.param], drafter.g, toys.DRAFT_VOCAB, "toy", "abc", {"training": {"steps": 1}})
    save_drafter(tmp_path / "drafter", drafter, info, torch.float32)
    return drafter, info, tmp_path


def test_round_trip(saved):
    drafter, info, folder = saved
    again, found = load_drafter(folder, "cpu", torch.float32)
    assert found == info
    assert again.state_dict().keys() == drafter.state_dict().keys()
    assert all(torch.equal(v, drafter.state_dict()[k]) for k, v in again.state_dict().items())
    assert not any(p.requires_grad for p in again.parameters())
    names = load_file(folder / "drafter" / "model.safetensors").keys()
    assert not any("embed_tokens" in name or "lent" in name for name in names)  # the target's embedding is lent, never saved


def test_tensors_that_do_not_fit_are_named(saved):
    _, _, folder = saved
    file = folder / "drafter" / "model.safetensors"
    tensors = load_file(file)
    save_file({("other" if k == "norm.weight" else k): (v[:-1].clone() if k == "d2t" else v) for k, v in tensors.items()}, file)
    with pytest.raises(KvshotError, match=r"missing \['norm.weight'\], unexpected \['other'\], other shape \['d2t \(23,\) instead of \(24,\)'\]"):
        load_drafter(folder, "cpu", torch.float32)


@pytest.mark.parametrize("bent", [lambda d2t: d2t + 500, lambda d2t: d2t * 0 - torch.arange(len(d2t)), lambda d2t: d2t.flip(0)])
def test_a_draft_vocabulary_that_is_none_is_refused(saved, bent):
    file = saved[2] / "drafter" / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"d2t": bent(tensors["d2t"]).contiguous()}, file)
    with pytest.raises(ConfigError, match=r"d2t names target ids .*expected ascending ones, each once"):
        load_drafter(saved[2], "cpu", torch.float32)


def test_other_formats_and_empty_folders(tmp_path):
    with pytest.raises(KvshotError, match="no trained drafter here"):
        find_drafter(tmp_path)
    (tmp_path / "train.json").write_text("{}")
    with pytest.raises(KvshotError, match="delete the whole folder and train it again"):
        find_drafter(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"format": "kvshot-drafter/9"}))
    with pytest.raises(KvshotError, match="without model"):
        load_drafter(tmp_path, "cpu", torch.float32)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(KvshotError, match="expected format 'kvshot-drafter/1', found 'kvshot-drafter/9'"):
        load_drafter(tmp_path, "cpu", torch.float32)
    for text in ("[]", '{"format": "kvshot-drafter/1"}', '{"format": "kvshot-drafter/1", "drafter": {"family": "other"}}', "{"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(KvshotError, match=r"config\.json"):
            load_drafter(tmp_path, "cpu", torch.float32)


def test_a_vocabulary_larger_than_the_targets():
    with pytest.raises(ConfigError, match="larger than the target's vocabulary of 40"):
        build_drafter(toys.FAMILIES["kv_only-1"], toys.geometry(), 41)
