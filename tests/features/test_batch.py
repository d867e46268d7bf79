"""Collation keeps every conversation's tensors apart and points each position at its own teacher row."""

from __future__ import annotations

import torch

from kvshot_ds.features.batch import collate
from kvshot_ds.features.spec import teacher_rows

TURNS = ([0, 0, 1, 1, 1, 0], [0, 2, 2], [0, 0])


def sample(turn: list[int], start: int) -> dict[str, torch.Tensor]:
    n, rows = len(turn), len(teacher_rows(torch.tensor(turn).numpy()))
    count = torch.arange(start, start + n, dtype=torch.float32)
    teacher = torch.arange(start, start + rows, dtype=torch.float32)
    return {
        "tokens": count.int(),
        "turn": torch.tensor(turn, dtype=torch.int32),
        "hidden.3": count[:, None].expand(n, 4).bfloat16(),
        "key.1": count[:, None, None].expand(n, 2, 3).bfloat16(),
        "value.1": -count[:, None, None].expand(n, 2, 3).bfloat16(),
        "query.5": -teacher[:, None, None].expand(rows, 6, 3).bfloat16(),
        "teacher.hidden": teacher[:, None].expand(rows, 4).bfloat16(),
        "teacher.argmax": teacher.int(),
        "teacher.lse": teacher,
    }


def test_conversations_lie_end_to_end() -> None:
    samples = [(f"c{i}", sample(turn, 100 * i)) for i, turn in enumerate(TURNS)]
    batch = collate(samples)
    assert batch.keys == ("c0", "c1", "c2") and batch.lengths == (6, 3, 2)
    assert batch.tokens.dtype == batch.turn.dtype == batch.teacher_argmax.dtype == torch.int64
    for name, joined in (("hidden.3", batch.hidden[3]), ("key.1", batch.keys_of[1]), ("value.1", batch.values_of[1])):
        for (_, tensors), part in zip(samples, joined.split(batch.lengths), strict=True):
            assert torch.equal(part, tensors[name])
    assert list(batch.queries_of) == [5] and batch.queries_of[5].shape == (3, 6, 3)
    assert torch.equal(batch.queries_of[5], torch.cat([tensors["query.5"] for _, tensors in samples]))


def test_teacher_index_points_at_the_row_of_the_position() -> None:
    samples = [(f"c{i}", sample(turn, 100 * i)) for i, turn in enumerate(TURNS)]
    batch = collate(samples)
    at = 0
    for _, tensors in samples:
        rows = teacher_rows(tensors["turn"].numpy()).tolist()
        for position in range(len(tensors["tokens"])):
            index = int(batch.teacher_index[at + position])
            assert (index >= 0) == (position in rows)
            if index >= 0:
                assert batch.teacher_lse[index] == tensors["teacher.lse"][rows.index(position)]
                assert torch.equal(batch.queries_of[5][index], tensors["query.5"][rows.index(position)])
        at += len(tensors["tokens"])
    assert int((batch.teacher_index >= 0).sum()) == len(batch.teacher_lse) == 3


def test_to_casts_features_and_leaves_ids_and_lse() -> None:
    batch = collate([("c", sample(TURNS[0], 0))]).to("cpu", torch.float64)
    assert batch.hidden[3].dtype == batch.keys_of[1].dtype == batch.values_of[1].dtype == batch.teacher_hidden.dtype == torch.float64
    assert batch.queries_of[5].dtype == torch.float64 and batch.queries_of[5].shape == (2, 6, 3)
    assert batch.tokens.dtype == torch.int64 and batch.teacher_lse.dtype == torch.float32


def test_the_teacher_as_it_was_captured() -> None:
    plain = sample(TURNS[0], 0)
    rest = {k: v for k, v in plain.items() if k != "teacher.hidden"}
    normed, unnormed = collate([("c", plain)]), collate([("c", {**rest, "teacher.unnormed": plain["teacher.hidden"]})])
    assert normed.teacher_normed and not unnormed.teacher_normed and torch.equal(normed.teacher_hidden, unnormed.teacher_hidden)
    ids, logp = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32), torch.tensor([[-0.5, -1.0], [-0.25, -2.0]])
    one = {**rest, "teacher.topk_ids": ids, "teacher.topk_logp": logp.bfloat16()}
    best = collate([("c", one), ("d", {**one, "teacher.topk_ids": ids + 1})]).to("cpu", torch.bfloat16)
    assert torch.equal(best.topk_ids, torch.cat([ids, ids + 1]).long()) and torch.equal(best.topk_logp, torch.cat([logp, logp]))
    assert best.topk_logp.dtype == torch.float32 and len(best.teacher_hidden) == 0 and len(best.teacher_lse) == 4
    assert normed.topk_ids.ndim == 1 and not len(normed.topk_ids)


def test_without_a_teacher_its_tensors_are_empty() -> None:
    bare = {k: v for k, v in sample(TURNS[0], 0).items() if not k.startswith("teacher")}
    batch = collate([("c", bare)])
    assert len(batch.teacher_hidden) == len(batch.teacher_argmax) == len(batch.teacher_lse) == 0
    assert len(batch.queries_of[5]) == 2, "queries need no teacher"
    assert collate([("c", {k: v for k, v in bare.items() if not k.startswith("query")})]).queries_of == {}
