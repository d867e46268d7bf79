"""Loss, metrics and gradients of the objective against a slow reference written from the formulas."""

from dataclasses import replace

import pytest
import torch

from kvshot_ds.config import ObjectiveConfig
from kvshot_ds.objectives.alignment import plan_rows, training_start
from kvshot_ds.objectives.objective import Objective, objective_for
from kvshot_ds.target import TargetParts
from tests import toys

STEPS, DECAY = 4, 0.8


def setup(name="hybrid-1", chunk=1024):
    g = toys.geometry()
    drafter = toys.drafter(name, g)
    batch = toys.batch(g).to("cpu", torch.float64)
    head = torch.randn(toys.VOCAB, g.hidden_size, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    drafter.bind(drafter.lent[0], head)
    logits = batch.teacher_hidden @ head.T
    object.__setattr__(batch, "teacher_argmax", logits.argmax(-1))
    object.__setattr__(batch, "teacher_lse", logits.logsumexp(-1))
    return drafter, batch, head, Objective(drafter, ObjectiveConfig(steps=STEPS, step_decay=DECAY, head_chunk=chunk), head)


def reference(drafter, batch, head, normaliser):
    """Row by row, step by step; the teacher's softmax over the whole vocabulary, cut and renormalised."""
    plan = plan_rows(batch, STEPS)
    h = drafter.unroll(training_start(batch, plan), plan.tokens).h
    ids = torch.arange(toys.DRAFT_VOCAB) + drafter.d2t
    loss, stats = 0, {"correct": torch.zeros(STEPS, plan.supervised).double(), "prob": torch.zeros(STEPS, plan.supervised).double()}
    for k in range(STEPS):
        logits = drafter.logits(h[k])
        for row in plan.valid[k].nonzero().flatten().tolist():
            r = batch.teacher_index[plan.anchors[row] + 1 + k]
            full = torch.softmax(batch.teacher_hidden[r] @ head.T, -1)
            q = torch.softmax(logits[row], -1)
            p = full[ids] / full[ids].sum()
            if int(full.argmax()) in ids.tolist():
                loss = loss - DECAY**k * (p * q.log()).sum() / normaliser
            wide = torch.zeros(toys.VOCAB, dtype=torch.float64)
            wide[ids] = q
            stats["prob"][k, row] = torch.minimum(full, wide).sum()
            stats["correct"][k, row] = float(ids[logits[row].argmax()] == full.argmax())
    return loss, stats, plan


@pytest.mark.parametrize("chunk", [1, 7, 1024])
@pytest.mark.parametrize("name", ["hidden_only-1", "kv_only-2", "hybrid-1", "dflash-2", "hybrid_block-2"])
def test_loss_metrics_and_gradients(name, chunk):
    drafter, batch, head, objective = setup(name, chunk)
    want, stats, plan = reference(drafter, batch, head, 11.0)
    out = objective(batch, plan, torch.tensor(11.0, dtype=torch.float64))
    torch.testing.assert_close(out.loss, want, rtol=0, atol=1e-6)
    torch.testing.assert_close(out.correct.double(), stats["correct"])
    torch.testing.assert_close(out.prob, stats["prob"], rtol=0, atol=1e-7)
    joint = stats["correct"].cumprod(0) * plan.valid
    torch.testing.assert_close(out.joint.double(), joint)
    sums = out.sums(plan)
    assert sums.den.tolist() == plan.valid.sum(1).tolist()
    assert sums.top1.tolist() == stats["correct"].sum(1).tolist()
    params = [p for p in drafter.parameters() if p.requires_grad]
    for (key, _), a, b in zip(
        drafter.named_parameters(), torch.autograd.grad(out.loss, params, allow_unused=True), torch.autograd.grad(want, params, allow_unused=True), strict=True
    ):
        assert (a is None) == (b is None), key
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}")


def test_rows_whose_teacher_is_outside_the_draft_vocabulary_count_as_errors_and_carry_no_loss():
    drafter, batch, _head, objective = setup()
    plan = plan_rows(batch, STEPS)
    one = torch.tensor(1.0, dtype=torch.float64)
    out = objective(batch, plan, one)
    outside = ~drafter.t2d[batch.teacher_argmax]
    assert outside.any()
    hit = torch.zeros_like(plan.valid).view(-1).index_put((plan.picks,), outside[plan.teacher_of]).view_as(plan.valid)
    assert not out.correct[hit].any() and (out.row_loss[hit] == 0).all()
    assert out.sums(plan).den[0] == plan.supervised  # still in the denominator


def test_gradients_do_not_depend_on_how_conversations_are_grouped():
    """1 batch of 3 = 3 batches of 1, normalised by the supervised rows of all of them."""
    from kvshot_ds.features.batch import collate

    drafter, batch, head, objective = setup("hybrid-2")
    whole = plan_rows(batch, STEPS)
    norm = torch.tensor(float(whole.supervised), dtype=torch.float64)
    objective(batch, whole, norm).loss.backward()
    want = {k: p.grad.clone() for k, p in drafter.named_parameters() if p.grad is not None}
    drafter.zero_grad()
    for c, turn in enumerate(toys.TURNS):
        part = collate([("x", toys.sample(turn, toys.geometry(), c))]).to("cpu", torch.float64)
        logits = part.teacher_hidden @ head.T
        object.__setattr__(part, "teacher_argmax", logits.argmax(-1))
        object.__setattr__(part, "teacher_lse", logits.logsumexp(-1))
        objective(part, plan_rows(part, STEPS), norm).loss.backward()
    for key, grad in want.items():
        torch.testing.assert_close(dict(drafter.named_parameters())[key].grad, grad, rtol=1e-6, atol=1e-9)


def gradients(drafter, loss):
    drafter.zero_grad()
    loss.backward()
    return {k: p.grad.clone() for k, p in drafter.named_parameters() if p.grad is not None}


ONE = torch.tensor(1.0, dtype=torch.float64)


@pytest.mark.parametrize("name", ["kv_only-2", "hybrid-1", "kv_block-2"])
def test_gradient_scale_reaches_the_drafters_own_k_and_v_projections_alone(name):
    drafter, batch, _, objective = setup(name)
    plan = plan_rows(batch, STEPS)
    plain = gradients(drafter, objective(batch, plan, ONE).loss)
    for layer in drafter.layers:
        layer.cross_attn.kv_gradient_scale = 50.0
    out = objective(batch, plan, ONE)
    scaled, touched = gradients(drafter, out.loss), 0
    for key, grad in scaled.items():
        mine = key.endswith(("cross_attn.k_proj.weight", "cross_attn.v_proj.weight"))
        touched += mine
        torch.testing.assert_close(grad, plain[key] * (50 if mine else 1), rtol=1e-9, atol=1e-12)
    assert touched == 2 * drafter.depth


@pytest.mark.parametrize("name", ["hybrid-1", "hybrid-2", "hybrid_block-2"])
def test_kv_branch_loss_is_the_loss_of_the_last_layer_without_its_other_path(name):
    drafter, batch, head, objective = setup(name)
    plan = plan_rows(batch, STEPS)
    both = Objective(drafter, objective.config.model_copy(update={"kv_branch_weight": 0.25}), head)
    out = both(batch, plan, ONE)
    last = drafter.layers[-1]
    h = drafter.unroll(training_start(batch, plan), plan.tokens).h
    branch = []

    def without_self_path(_layer, _args, output):  # what the layer would say were its attention output o alone
        branch.append(output.kv_branch)

    handle = last.register_forward_hook(without_self_path)
    unrolled = both.unroll(batch, plan)
    handle.remove()
    assert torch.equal(unrolled.h, h)  # asking for it changes nothing
    n = last.mix.forward
    last.mix.forward = lambda _n, o: (o, None)  # the same layer, its gate replaced by "take o"
    steps = 1 if name.startswith("hybrid-") else STEPS  # later steps of a chain would follow another hidden state
    want = drafter.unroll(training_start(batch, plan), plan.tokens[:steps]).h
    last.mix.forward = n
    torch.testing.assert_close(unrolled.kv_branch[:steps], want, rtol=0, atol=1e-12)
    assert (want - h[:steps]).abs().max() > 0.01
    plain = objective(batch, plan, ONE)
    torch.testing.assert_close(out.loss, plain.loss + out.kv_branch, rtol=0, atol=1e-9)
    assert float(out.kv_branch) > 0
    assert torch.equal(out.correct, plain.correct)


def test_kv_branch_loss_feeds_a_branch_whose_gate_is_shut():
    drafter, batch, head, objective = setup("hybrid-1")
    with torch.no_grad():
        drafter.layers[0].mix.gate_proj.bias.fill_(-60)
    plan = plan_rows(batch, STEPS)
    starved = gradients(drafter, objective(batch, plan, ONE).loss)
    fed = gradients(drafter, Objective(drafter, objective.config.model_copy(update={"kv_branch_weight": 1.0}), head)(batch, plan, ONE).loss)
    for name in ("cross_attn.o_proj", "cross_attn.q_proj", "projector.v_proj"):
        assert starved[f"layers.0.{name}.weight"].abs().max() < 1e-9 < 1e-4 < fed[f"layers.0.{name}.weight"].abs().max()


@pytest.mark.parametrize("name", ["kv_only-2", "kv_only-head_concat", "hybrid-2", "kv_block-per_layer"])
def test_query_distillation(name):
    """Against loops: relative squared error to the target's queries at position t + 1 + k; zero when they are the target's own."""
    drafter, batch, head, objective = setup(name)
    plan = plan_rows(batch, STEPS)
    both = Objective(drafter, objective.config.model_copy(update={"query_distill_weight": 0.5}), head)
    assert both.required_features().query_layers
    queries = both.unroll(batch, plan).queries
    assert len(queries) == drafter.depth
    want = 0.0
    for layer, mine in zip(drafter.layers, queries, strict=True):
        for k in range(STEPS):
            for row in plan.valid[k].nonzero().flatten().tolist():
                r = batch.teacher_index[plan.anchors[row] + 1 + k]
                if int(batch.teacher_argmax[r]) not in drafter.draft_ids.tolist():
                    continue
                asked = torch.cat([batch.queries_of[i][r] for i in layer.projector.query_layers])
                error = [(a - b).square().sum() / b.square().sum() for a, b in zip(mine[k, row], asked, strict=True)]
                want += DECAY**k * float(torch.stack(error).mean().detach()) / 11 / drafter.depth
    first, at = drafter.layers[0], plan.anchors
    if name in toys.BLOCK_FAMILIES:  # of a block, those of slot k: the clean token stands at t + 1, masks behind it
        clean, mask = drafter.embed(batch.tokens[at + 1]), drafter.mask_embedding.expand(len(at), -1)
        for k, x in enumerate((clean, mask, mask)):
            torch.testing.assert_close(queries[0][k], first.cross_attn.query(first.input_layernorm(x)))
    elif name.startswith("kv_only"):
        torch.testing.assert_close(queries[0][2], first.cross_attn.query(first.input_layernorm(drafter.embed(plan.tokens[2]))))
    out = both(batch, plan, torch.tensor(11.0, dtype=torch.float64))
    assert float(out.query) == pytest.approx(0.5 * want, rel=1e-5)
    assert float(out.loss) == pytest.approx(float(objective(batch, plan, torch.tensor(11.0, dtype=torch.float64)).loss + out.query), rel=1e-9)


def test_offline_step_k_is_step_0_of_the_row_k_later():
    drafter, batch, head, objective = setup("hybrid-2")
    online = plan_rows(batch, STEPS)
    plan = plan_rows(batch, STEPS, offline=True)
    assert torch.equal(plan.valid, online.valid)  # every row that a step needs is there
    first = drafter.unroll(training_start(batch, plan), plan.tokens[:1]).h[0]
    row_of = {int(a): i for i, a in enumerate(plan.anchors)}
    h = Objective(drafter, objective.config.model_copy(update={"drift": "offline"}), head).unroll(batch, plan).h
    checked = 0
    for k in range(STEPS):
        for row in plan.valid[k].nonzero().flatten().tolist():
            assert torch.equal(h[k, row], first[row_of[int(plan.anchors[row]) + k]])
            checked += k > 0
    assert checked > 20
    half = plan_rows(batch, STEPS, fraction=0.5, offline=True)
    assert 0 < half.valid[1:].sum() < online.valid[1:].sum()
    for k in range(STEPS):
        for row in half.valid[k].nonzero().flatten().tolist():
            assert int(half.anchors[row]) + k in half.anchors.tolist()


@pytest.mark.parametrize("name", toys.FAMILIES)
def test_recomputing_layers_changes_nothing(name):
    drafter, batch, _, objective = setup(name)
    plan = plan_rows(batch, STEPS)
    plain = objective(batch, plan, ONE)
    want = gradients(drafter, plain.loss)
    drafter.recompute = True
    again = objective(batch, plan, ONE)
    assert torch.equal(again.loss, plain.loss)
    got = gradients(drafter, again.loss)
    assert got.keys() == want.keys()
    for key, grad in got.items():
        torch.testing.assert_close(grad, want[key], rtol=1e-12, atol=1e-12)


def test_recomputing_keeps_fewer_activations():
    drafter, batch, _, objective = setup("hybrid-2")
    plan = plan_rows(batch, STEPS)

    def kept() -> int:
        sizes: dict[int, int] = {}

        def pack(x):
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            objective(batch, plan, ONE)
        return sum(sizes.values())

    plain = kept()
    drafter.recompute = True
    assert kept() < 0.6 * plain


@pytest.mark.parametrize("name", ["kv_only-none", "kv_block-none"])
def test_the_control_has_no_gradient_into_any_target_feature(name):
    drafter, batch, _, objective = setup(name)
    features = [x.requires_grad_() for tensors in (batch.hidden, batch.keys_of, batch.values_of) for x in tensors.values()]
    objective(batch, plan_rows(batch, STEPS), ONE).loss.backward()
    assert features and all(x.grad is None for x in features)
    assert drafter.required_features().hidden_layers == drafter.required_features().kv_layers == ()


def test_hard_labels_are_the_next_tokens_and_rows_without_one_carry_no_loss():
    drafter, batch, head, objective = setup("kv_only-1")
    plan = plan_rows(batch, STEPS)
    out = Objective(drafter, objective.config.model_copy(update={"loss": "hard_ce"}), head)(batch, plan, ONE)
    h = drafter.unroll(training_start(batch, plan), plan.tokens).h
    ids, total = drafter.draft_ids.tolist(), 0.0
    for k in range(STEPS):
        for row in plan.valid[k].nonzero().flatten().tolist():
            label = int(batch.tokens[plan.anchors[row] + 2 + k])
            if label in ids:
                want = -float(torch.log_softmax(drafter.logits(h[k, row][None])[0], -1)[ids.index(label)])
                assert float(out.row_loss[k, row]) == pytest.approx(want, rel=1e-6)
                total += DECAY**k * want
            else:
                assert out.row_loss[k, row] == 0
    assert float(out.loss) == pytest.approx(total, rel=1e-6)
    assert float(out.sums(plan).weighted.sum()) == pytest.approx(total, rel=1e-5)


LOSSES = [{"loss": "soft_ce"}, {"loss": "kl"}, {"loss": "hard_ce"}, {"loss": "lk_alpha"}, {"loss": "lk_lambda"}, {"loss": "hard_ce", "weights": "dpace"}]


def with_best_tokens(batch, head, k):
    """The same rows with the k best tokens as their teacher, and the teacher's distribution [R, V] cut to them, one by one."""
    logits = batch.teacher_hidden @ head.T
    logp = torch.log_softmax(logits, -1)
    ids = torch.tensor([sorted(range(logits.shape[1]), key=lambda v, row=row: -row[v])[:k] for row in logp.tolist()])
    cut = torch.zeros_like(logp)
    for row, best in enumerate(ids.tolist()):
        for v in best:
            cut[row, v] = logp[row, v].exp()
    return replace(batch, teacher_hidden=torch.empty(0), topk_ids=ids, topk_logp=logp.gather(1, ids)), cut


@pytest.mark.parametrize("options", LOSSES, ids=str)
@pytest.mark.parametrize("k", [3, 12])
def test_the_best_tokens_as_teacher(options, k):
    """Loss, acceptance and gradients, row by row and step by step, with the teacher's distribution written out and cut."""
    drafter, batch, head, _ = setup("hybrid-1")
    best, cut = with_best_tokens(batch, head, k)
    config = ObjectiveConfig(steps=STEPS, step_decay=DECAY, lk_eta=2.0, **options)
    plan = plan_rows(batch, STEPS)
    out = Objective(drafter, config, None)(best, plan, ONE)
    h = drafter.unroll(training_start(batch, plan), plan.tokens).h
    ids, loss = drafter.draft_ids.tolist(), torch.zeros((), dtype=torch.float64)
    for row in range(plan.supervised):
        steps = plan.valid[:, row].nonzero().flatten().tolist()
        q = [torch.softmax(drafter.logits(h[k, row][None])[0], -1) for k in steps]
        labels = [int(batch.tokens[plan.anchors[row] + 2 + k]) for k in steps]
        sure = [float(x[ids.index(v)].detach()) * 0.5 + 0.5 if v in ids else 0.5 for x, v in zip(q, labels, strict=True)]
        reached = [float(torch.tensor(sure[: j + 1]).double().prod()) for j in range(len(sure))]
        for j, (k_, x, label) in enumerate(zip(steps, q, labels, strict=True)):
            r = batch.teacher_index[plan.anchors[row] + 1 + k_]
            p = cut[r][ids]
            a, tilde = torch.minimum(p, x).sum(), p / p.sum()
            assert float(out.prob[k_, row]) == pytest.approx(float(a.detach()), abs=1e-9)
            if (label if config.loss == "hard_ce" else int(batch.teacher_argmax[r])) not in ids:
                continue
            kl = sum(t * (t / y).log() for t, y in zip(tilde, x, strict=True) if t > 0)
            part = float(torch.exp(-2.0 * a.detach()))
            one = {
                "soft_ce": -(tilde * x.log()).sum(),
                "kl": kl,
                "hard_ce": -x[ids.index(label)].log() if label in ids else None,
                "lk_alpha": -a.log(),
                "lk_lambda": part * kl + (1 - part) * (1 - a),
            }[config.loss]
            loss = loss + (sum(reached[j:]) if config.weights == "dpace" else DECAY**k_) * one
    torch.testing.assert_close(out.loss, loss, rtol=1e-7, atol=0)  # the weights of the steps are fp32
    params = [p for p in drafter.parameters() if p.requires_grad]
    got, want = (torch.autograd.grad(x, params, allow_unused=True) for x in (out.loss, loss))
    assert any(x is not None and x.abs().max() > 1e-3 for x in want)
    for a, b in zip(got, want, strict=True):
        if b is not None:
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_the_more_tokens_the_closer_to_the_whole_teacher():
    _, batch, head, objective = setup("hidden_only-1")
    plan = plan_rows(batch, STEPS)
    whole = objective(batch, plan, ONE)
    far = [abs(float(objective(with_best_tokens(batch, head, k)[0], plan, ONE).loss - whole.loss)) for k in (2, 8, 30, toys.VOCAB)]
    assert far == sorted(far, reverse=True) and far[-1] < 1e-9 < far[0]
    few = objective(with_best_tokens(batch, head, 8)[0], plan, ONE)
    assert torch.equal(few.correct, whole.correct) and (few.prob <= whole.prob + 1e-12).all(), "what is not there can only be missing from a"


def test_an_unnormed_teacher_is_normed_as_the_target_does_it():
    drafter, batch, head, _ = setup()
    plan, weight = plan_rows(batch, STEPS), torch.rand(drafter.g.hidden_size, generator=torch.Generator().manual_seed(2)).double() + 0.5
    raw = batch.teacher_hidden * 3
    normed = raw / (raw.square().mean(-1, keepdim=True) + drafter.g.norm_eps).sqrt() * weight
    config = ObjectiveConfig(steps=STEPS)
    want = Objective(drafter, config, head)(replace(batch, teacher_hidden=normed), plan, ONE)
    got = Objective(drafter, config, head, weight)(replace(batch, teacher_hidden=raw, teacher_normed=False), plan, ONE)
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(got.prob, want.prob, rtol=1e-9, atol=1e-12)
    with pytest.raises(ValueError, match="needs target_norm"):
        Objective(drafter, config, head)(replace(batch, teacher_normed=False), plan, ONE)


def test_the_objective_keeps_the_target_head_only_where_it_is_used(tmp_path):
    drafter, batch, head, _ = setup()
    parts = TargetParts(tmp_path, head, torch.ones(drafter.g.hidden_size).double(), head)
    needs = drafter.required_features()
    best = objective_for(drafter, ObjectiveConfig(steps=STEPS), replace(needs, teacher="top_k"), parts)
    assert not best._teacher_head and objective_for(drafter, best.config, needs, parts)._teacher_head[0].shape == (toys.DRAFT_VOCAB, drafter.g.hidden_size)
    with pytest.raises(ValueError, match="needs target_head"):
        best(batch, plan_rows(batch, STEPS), ONE)


@pytest.mark.parametrize("teacher", ["best tokens", "unnormed"])
@pytest.mark.parametrize("loss", ["soft_ce", "kl", "hard_ce", "lk_alpha", "lk_lambda"])
def test_no_teacher_waits_for_the_device(teacher, loss):
    """On the meta device there is no value to wait for."""
    meta = torch.device("meta")
    drafter, batch = toys.drafter("hidden_only-1", dtype=torch.float32), toys.batch(toys.geometry())
    if teacher == "unnormed":
        batch = replace(batch, teacher_normed=False)
    else:
        batch, _ = with_best_tokens(batch, torch.ones(toys.VOCAB, drafter.g.hidden_size), 5)
    plan = plan_rows(batch, STEPS).to(meta)
    drafter, embedding = drafter.to(meta), torch.empty(toys.VOCAB, drafter.g.hidden_size, device=meta)
    drafter.bind(embedding, embedding)
    objective = Objective(drafter, ObjectiveConfig(steps=STEPS, loss=loss), embedding, embedding[0])
    objective._teacher_head = [torch.empty(toys.DRAFT_VOCAB, drafter.g.hidden_size, device=meta)]
    objective(batch.to(meta, torch.float32), plan, torch.ones((), device=meta)).loss.backward()
