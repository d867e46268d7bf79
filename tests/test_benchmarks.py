"""The benchmarks run, and what they compare is the same mathematics."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks import attention, dense, generate, measure, step

TINY = ["--heads", "4", "--kv-heads", "2", "--head-dim", "8", "--steps", "3", "--repeats", "1", "--clock", "cpu"]


def test_attention_prints_its_table():
    done = CliRunner().invoke(attention.main, ["--lengths", "24,48,96", *TINY])
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["24", "48", "96"]
    assert re.fullmatch(r"merged memory over S: -?[\d.]+ KiB a row, R\^2 = -?[\d.]+", lines[5])


def test_step_prints_its_table():
    shape = ["--width", "32", "--inner", "48", "--vocab", "60"]
    done = CliRunner().invoke(step.main, ["--lengths", "40", "--draft-vocabs", "24,60", *TINY, *shape])
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.output.splitlines()[2:]]
    assert [row[:2] for row in rows] == [["24", "40"], ["60", "40"]]
    assert all(float(row[i]) > 0 for row in rows for i in (2, 4, 6))


@pytest.mark.parametrize("spread", [[], ["--spread"]])
def test_generate_prints_its_table(tiny_target, spread):
    arguments = ["--target", str(tiny_target), "--prompts", "9", "--batch-size", "4", "--max-new-tokens", "12", *spread]
    done = CliRunner().invoke(generate.main, arguments)
    assert done.exit_code == 0, done.output
    assert "9 of 9 answers are the same" in done.output
    ours, plain = (re.search(rf"^ *{name} +(\d+) +[\d.]+ +[\d.]+$", done.output, re.MULTILINE) for name in ("full batch", "model.generate"))
    assert ours and plain and ours[1] == plain[1] and int(ours[1]) > 30


def test_a_contender_that_fails_is_shown():
    with pytest.raises(RuntimeError, match=r"(?s)ended with 1 .*TypeError"):
        measure.contend("benchmarks.step", [{"ours": True}], measure.Options(1, "cpu", 1))


@pytest.mark.parametrize("benchmark", [attention, step])
def test_what_does_not_fit_is_skipped_with_a_note(benchmark, monkeypatch):
    monkeypatch.setattr(benchmark, "available_memory", lambda: 1000)
    arguments = ["--lengths", "16", *TINY, *(["--draft-vocabs", "60", "--vocab", "60", "--width", "32"] if benchmark is step else [])]
    done = CliRunner().invoke(benchmark.main, arguments)
    assert done.exit_code == 0, done.output
    assert "skipped: would need about" in done.output


def test_both_attentions_agree():
    made = attention.inputs(attention.Shape(40, 4, 6, 2, 8))
    torch.testing.assert_close(attention.unroll(True, *made), attention.unroll(False, *made), rtol=0, atol=1e-6)
    assert attention.run(True, *made) == pytest.approx(attention.run(False, *made), rel=1e-5)


def test_the_dense_attention_hides_the_future():
    q, k, v = (torch.randn(5, 2, 4) for _ in range(3))
    out = dense.dense_attention(q, k, v, [], dense.causal_mask(5), 0.5)
    torch.testing.assert_close(out[0], v[0])
    torch.testing.assert_close(out[2], torch.stack([torch.softmax(k[:3, a] @ q[2, a] * 0.5, 0) @ v[:3, a] for a in range(2)]))


@pytest.mark.parametrize("draft_vocab", [24, 60])
def test_both_steps_agree_in_loss_and_gradients(draft_vocab):
    problem = step.problem(step.Shape(40, 5, 32, 4, 2, 8, 48, 60, draft_vocab))
    (mine, loss), (plain, other) = step.ours(problem), step.straightforward(problem)
    assert step.step(mine, loss) == pytest.approx(step.step(plain, other), rel=1e-5)
    want = dict(plain.named_parameters())
    got = dict(mine.named_parameters())
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name].grad, want[name].grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("value", [2.001, float("nan")])
def test_contenders_that_disagree_are_not_timed(value, monkeypatch):
    calls = []

    def child(module, case, mode):
        calls.append(mode.clock)
        return measure.Measured(0.0, 100.0, case["value"])

    monkeypatch.setattr(measure, "_child", child)
    with pytest.raises(RuntimeError, match="agree to 1e-4"):
        measure.contend("m", [{"value": 2.0}, {"value": value}], measure.Options(1, "cpu", 2))
    assert calls == [None, None]
    assert len(measure.contend("m", [{"value": 2.0}, {"value": 2.0001}], measure.Options(1, "cpu", 2))) == 2
    assert calls[2:] == [None, None, *["cpu"] * 4]


def test_linear_fit():
    slope, r2 = measure.linear_fit([1, 2, 3], [3.0, 5.0, 7.0])
    assert (slope, r2) == (pytest.approx(2), pytest.approx(1))
    assert measure.linear_fit([1, 2, 3, 4], [1.0, 4.0, 9.0, 16.0])[1] < 0.99


def test_peak_memory_is_what_the_first_run_adds():
    """100 MiB that are given back before the run ends count; 300 MiB of inputs do not."""
    code = """if True:
        import torch
        from benchmarks.measure import MIB, Mode, measure, report
        inputs = torch.ones(300 * MIB // 4)
        def run():
            return float(torch.ones(100 * MIB // 4).sum() / inputs[0])
        report(measure(run, Mode(1, "wall")))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
    found = json.loads(done.stdout)
    assert found["value"] == 100 * measure.MIB // 4
    assert 99 < found["peak"] / measure.MIB < 130
    assert found["seconds"] > 0
