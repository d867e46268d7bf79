"""The stores that are compared exist as options, and each has a folder and a run of its own."""

from __future__ import annotations

from pathlib import Path

from benchmarks.stores import STORES, names_of
from kvshot_ds.config import load_recipe

RECIPE = Path(__file__).parents[1] / "recipes/tiny/hybrid.yaml"


def test_each_store_is_a_recipe_of_its_own() -> None:
    recipe = load_recipe(RECIPE, ("work=w",))
    found = {}
    for store, options in STORES.items():
        shards, name, folder = names_of(recipe, store)
        one = load_recipe(RECIPE, ("work=w", *options, shards, name))
        assert one.run_dir == folder
        found[one.shards_dir, one.run_dir] = (one.capture.features.store.hidden, one.capture.features.store.kv, one.capture.features.teacher)
    assert list(found.values()) == [("bf16", "bf16", "last_hidden"), ("fp8", "fp8", "last_hidden"), ("int8", "int8", "last_hidden"), ("fp8", "fp8", "top_k")]
