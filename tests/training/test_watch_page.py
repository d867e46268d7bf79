"""TensorBoard's page of a run, in a real browser: what was logged is seen."""

from __future__ import annotations

import sys
from urllib.parse import quote

import pytest

from kvshot_ds.training.launch import run
from tests.browser import Page, browser, child, require_browser, until
from tests.training.runs import board

# Filter of the page -> tags it must show. TensorBoard puts no more than 8 or so of them on one page.
TAGS = {
    "train/(loss|mat)": ("train/loss", "train/mat", "train/mat_joint", *(f"train/loss_step/{k}" for k in range(3))),
    "train/(retention|lr|epoch)": ("train/retention", "train/lr", "train/epoch"),
    **{f"train/accept_{kind}": tuple(f"train/accept_{kind}/{k}" for k in range(3)) for kind in ("top1", "prob", "joint")},
    "heldout/(mat|retention|accept_joint)": ("heldout/mat", "heldout/mat_joint", "heldout/retention", *(f"heldout/accept_joint/{k}" for k in range(3))),
    "_per_s|mfu|stall": ("train/tokens_per_s", "train/samples_per_s", "train/mfu", "train/data_stall_share"),
    "train/grad|norm/(cross|gate|head)": ("train/grad_norm", "grad_norm/cross", "grad_norm/cross_kv", "grad_norm/gate", "grad_norm/head"),
    "time/": tuple(f"time/{part}" for part in ("step", "data", "forward", "backward", "optimizer", "communication")),
    "memory|comm/": ("memory/host_gib", "comm/gigabytes_per_step"),
    "^gate/": ("gate/mean", "gate/share_below_0.05", "gate/share_above_0.95"),
}


@pytest.fixture
def server(recipe, tmp_path):
    """A run, and the address of a TensorBoard that shows it."""
    require_browser()
    r = recipe(drafter="hybrid", epochs=2, optim={"lr": 1e-2}, eval_every=6, peak_tflops=1e-3)
    run(r)
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(r.work / "runs"), "--port", "0", "--host", "127.0.0.1", "--load_fast=false"]
    with child(command, r"(http://127\.0\.0\.1:\d+)", tmp_path / "tensorboard.log") as url:
        yield r, url


def seen(page: Page) -> str:
    """The page's text without gaps: a tag is shown in two pieces, its group and the rest."""
    return "".join(page.text())


def shows(page: Page, *texts: str) -> None:
    until(lambda: all(text in seen(page) for text in texts), lambda: f"missing: {[t for t in texts if t not in seen(page)]} in {seen(page)[:2000]}")


def test_scalars_gate_options_and_hparams_are_seen(server, tmp_path):
    r, url = server
    logged = board(r)
    with browser(tmp_path) as page:
        for wanted, tags in TAGS.items():
            page.open(f"{url}/?tagFilter={quote(wanted)}#timeseries")
            shows(page, "run/tensorboard", *tags)
        page.open(f"{url}/?tagFilter={quote('train/loss$')}#timeseries")
        last = f"{logged['train/loss'][-1]:.4f}".rstrip("0")  # as the page rounds it, beside the curve
        until(lambda: last in page.text(), lambda: f"{last} is not in {page.text()}")
        (tmp_path / "page.png").write_bytes(page.picture())  # for whoever wants to see it
        for part, texts in (
            ("histograms", ("gate", "run/tensorboard")),
            ("hparams", ("drafter.family", "optim.lr", "train/loss", "heldout/mat")),
            ("text", ("recipe/text_summary", "family: hybrid", "steps: 3")),
        ):
            page.open("about:blank")
            page.open(f"{url}/#{part}")
            shows(page, *texts)
