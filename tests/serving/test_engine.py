"""vLLM's own scheduler, block manager and prefix cache over Lamina's pages, on the CPU."""

import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is tested in an environment of its own: make test-vllm")

from lamina import Controller, ControllerConfig, LaminaCache
from lamina.basis.calibrate import calibrate
from lamina.engines.hf import cache_kwarg
from lamina.engines.vllm.sizes import LayerShape, exact_pages, sizes
from lamina.errors import UnsupportedModelError
from lamina.pages import WindowConfig
from tiny_models import VOCAB, build, profile_of, tokens

DRIVE = Path(__file__).with_name("drive.py")
LENGTHS = (5, 63, 64, 65, 130, 300, 700, 1500)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama and its profile, as vLLM reads them."""
    path = tmp_path_factory.mktemp("model")
    build("Llama").save_pretrained(path)
    profile_of("Llama").save(path / "model.profile")
    return path


@pytest.fixture
def drive(folder, tmp_path):
    """Runs an engine with Lamina's settings, or without; gives its answers, or what it complained of."""

    def run(lamina, calls, fails=False, **engine):
        settings = {"profile": str(folder / "model.profile"), "deterministic": True}
        engine = {
            "model": str(folder), "max_model_len": 2048, "max_num_seqs": 8, "max_num_batched_tokens": 4096,
            "kv_cache_memory_bytes": 200 << 20, "enable_prefix_caching": False,
        } | engine  # fmt: skip
        if lamina is not None:
            engine["additional_config"] = {"lamina": settings | lamina}
        task, result = tmp_path / "task.json", tmp_path / "result.json"
        task.write_text(json.dumps({"engine": engine, "calls": calls}))
        done = subprocess.run(
            [sys.executable, str(DRIVE), str(task), str(result)], capture_output=True, text=True, timeout=600,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, check=False,
        )  # fmt: skip
        if fails:
            assert done.returncode, "it should have been refused"
            return done.stdout + done.stderr
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return json.loads(result.read_text()) | {"log": done.stdout + done.stderr}

    return run


def prompts():
    return [tokens(1, n, n)[0].tolist() for n in LENGTHS]


def call(given, n=32, **more):
    return {"prompts": given, "tokens": n, **more}


def first(answers):
    return [a["tokens"] for a in answers]


def agree(a, b):
    return sum(x == y for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def exact(folder):
    """Greedy answers of the model itself."""
    model, found = build("Llama"), []
    for ids in prompts():
        x = torch.tensor([ids])
        with torch.no_grad():
            found.append(model.generate(x, max_new_tokens=32, do_sample=False)[0, len(ids) :].tolist())
    return found


def teacher_forced(ids, answer, tiers, budget):
    """Log-probabilities of the transformers engine, fed with the same chunks."""
    model = build("Llama")
    cache = LaminaCache(model, profile_of("Llama"), tiers=tiers)
    x, found = torch.tensor([ids + answer[:-1]]), []
    ends = [*range(budget, len(ids), budget), len(ids), *range(len(ids) + 1, x.shape[1] + 1)]
    with torch.no_grad():
        for a, b in zip([0, *ends], ends):
            found.append(model(x[:, a:b], **cache_kwarg(model, cache)).logits[0].log_softmax(-1))
    return torch.cat(found)


def told(rows):
    return torch.tensor([[row[str(t)] for t in range(VOCAB)] for row in rows])


@pytest.mark.parametrize(("tiers", "budget"), [(8, 4096), ((4, 2), 64), (2, 256)])
def test_logits_are_those_of_the_transformers_engine(drive, tiers, budget):
    ids = tokens(1, 700, 3)[0].tolist()
    asked = call([ids], 8, logprobs=VOCAB, prompt_logprobs=VOCAB)
    found = drive({"tiers": tiers}, [asked], max_num_batched_tokens=budget)
    (answer,) = found["answers"][0]
    expected = teacher_forced(ids, answer["tokens"], tiers, budget)
    got = torch.cat([told(answer["prompt_logprobs"][1:]), told(answer["logprobs"])])
    error = (got - expected).abs()
    # Rows that differ by rounding can fall to another code here and there.
    assert float(error.mean()) < 1e-4 and float(error.max()) < 0.05
    assert found["stats"]["planes_shed"] == 0


def test_answers_of_a_batch_chunks_and_single_requests_at_8_bits(drive, exact):
    found = drive({"tiers": 8}, [call(prompts()), *(call([p]) for p in prompts())])
    assert agree(first(found["answers"][0]), exact) >= 7
    assert agree([first(a)[0] for a in found["answers"][1:]], exact) >= 7
    chunked = drive({"tiers": 8}, [call(prompts())], max_num_batched_tokens=64)
    assert agree(first(chunked["answers"][0]), exact) >= 7


def test_a_prefix_is_found_again(drive, exact):
    found = drive({"tiers": 8}, [call(prompts()), call(prompts())], enable_prefix_caching=True)
    assert agree(first(found["answers"][0]), exact) >= 7 and agree(first(found["answers"][1]), exact) >= 7
    cached = [a["cached"] for a in found["answers"][1]]
    assert cached == [(n - 1) // 64 * 64 for n in LENGTHS] and found["stats"]["hits"] >= sum(cached) // 64
    assert found["stats"]["hits_below_tier"] == 0


def test_preempted_requests_go_on(drive, exact):
    # 27 blocks are short for the longest request beside others.
    found = drive({"tiers": 8}, [call(prompts())], num_gpu_blocks_override=27, max_model_len=1600)
    assert found["blocks"] == 27 and found["stats"]["preempted"] > 0
    assert agree(first(found["answers"][0]), exact) >= 7


def test_a_small_arena_sheds_planes_and_fails_no_request(drive, exact):
    found = drive({"tiers": 8, "arena_gb": 0.0003, "deterministic": False}, [call(prompts(), 100)])
    stats = found["stats"]
    assert stats["planes_shed"] > 0 and stats["arena_used"] <= stats["arena_slots"]
    assert all(len(a["tokens"]) == 100 for a in found["answers"][0])


def test_the_controller_decides_while_requests_run(drive):
    settings = {"deterministic": False, "controller": {"target_bits": 3.0, "rate": 0.25}}
    found = drive(settings, [call(prompts(), 64)])
    assert found["stats"]["controller"]["step"] >= 60
    assert {bits for pair in found["stats"]["tiers"] for bits in pair} <= {2, 4, 8}


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
REPEATED = (20, 63, 64, 65, 130, 280, 320, 700)


@pytest.mark.parametrize("tiers", [8, 2])
def test_drafts_that_are_taken_back_leave_nothing_behind(drive, tiers):
    prompts = [(tokens(1, 17 + i, i)[0].tolist() * 60)[:n] for i, n in enumerate(REPEATED)]
    plain = drive({"tiers": tiers}, [call(prompts, 96)])
    expected = first(plain["answers"][0])
    # The second call finds pages that were filled while drafts were taken back; the last one lets the others' go.
    again = [p + answer[:72] for p, answer in zip(prompts, expected)]
    found = drive(
        {"tiers": tiers}, [call(prompts, 96), call(again, 24), call([[1, 2, 3]], 1)],
        speculative_config=NGRAM, async_scheduling=False, enable_prefix_caching=True,
    )  # fmt: skip
    assert agree(first(found["answers"][0]), expected) >= 7
    assert agree(first(found["answers"][1]), [answer[72:] for answer in expected]) >= 7
    assert [a["cached"] for a in found["answers"][1]] == [(n + 71) // 64 * 64 for n in REPEATED]
    kept = gone = 0
    for answer in found["answers"][0]:
        for (start, n), (then, _) in pairwise(answer["steps"][1:]):
            kept, gone = kept + then - start - 1, gone + n - (then - start)
    assert kept > 20 and gone > 20
    stats = found["stats"]
    # No call fills a page that the first has not filled: all that were filled are closed, each once.
    planes = {8: 12, 2: 0}[tiers]
    assert stats["arena_used"] == planes * sum((n + 95) // 64 for n in REPEATED)
    assert stats["planes_shed"] == stats["non_finite"] == stats["hits_below_tier"] == 0 and stats["requests"] == 1


STATE = Controller(ControllerConfig(), [(2, 2)] * 2).snapshot()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps(STATE)[:-100], "state.json cannot be read as a controller's state ("),
        ("[1, 2]", "this is no snapshot of a controller"),
        (json.dumps(STATE | {"random": [3, [1, 2], None]}), "the controller's snapshot is damaged (ValueError("),
        (json.dumps(Controller(ControllerConfig(), [(2, 2)] * 3).snapshot()), "has 3 layers, the model 2"),
    ],
    ids=["cut off", "a list", "no generator", "another model's"],
)
def test_a_damaged_controller_state_is_refused_at_the_start(drive, tmp_path, text, message):
    path = tmp_path / "state.json"
    path.write_text(text)
    asked = {"deterministic": False, "controller": {}, "controller_state": str(path)}
    assert message in drive(asked, [], fails=True)
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-100], " cannot be read as a profile ("),
        (lambda data: data[:-100] + b"\xff" * 100, " cannot be read as a profile (its numbers have the checksum "),
    ],
    ids=["cut off", "overwritten"],
)
def test_a_damaged_profile_is_refused_at_the_start(drive, folder, tmp_path, damage, message):
    path = tmp_path / "damaged.profile"
    path.write_bytes(damage((folder / "model.profile").read_bytes()))
    assert f"{path}{message}" in drive({"profile": str(path)}, [], fails=True)


def test_two_ranks_answer_as_one(drive, exact):
    found = drive({"tiers": 8}, [call(prompts())], tensor_parallel_size=2)
    assert len(found["ranks"]) == 2 and agree(first(found["answers"][0]), exact) >= 7


def test_ranks_decide_and_shed_alike(drive):
    settings = {"deterministic": False, "controller": {"target_bits": 4.0, "rate": 0.25}, "arena_gb": 0.00001}
    one, other = drive(settings, [call(prompts(), 300)], tensor_parallel_size=2)["ranks"]
    assert one["planes_shed"] > 0 and one["firings"] > 50
    assert one == other


@pytest.mark.parametrize(
    ("lamina", "engine", "message"),
    [
        ({"profile": "/nowhere"}, {}, "there is no profile at /nowhere"),
        ({"tiers": 3}, {}, "a tier is one of 2, 4, 8 bits"),
        ({}, {"kv_cache_dtype": "fp8"}, "leave it at auto"),
    ],
)
def test_what_cannot_be_served_is_refused_at_the_start(drive, lamina, engine, message):
    assert message in drive(lamina, [], fails=True, **engine)


def test_another_version_of_vllm_is_refused_where_lamina_is_configured(folder, monkeypatch):
    import vllm
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    from lamina.engines.vllm import plugin

    monkeypatch.setattr(vllm, "__version__", "0.40.1")
    for additional, refused in (({}, False), ({"lamina": {"profile": str(folder / "model.profile")}}, True)):
        with set_current_vllm_config(VllmConfig(additional_config=additional)):
            if not refused:
                assert plugin.CpuBackend is CPUAttentionBackend
                continue
            for name in ("CpuBackend", "LaminaBackend"):
                with pytest.raises(UnsupportedModelError, match=r"0\.32 and 0\.33, not 0\.40\.1"):
                    getattr(plugin, name)


def test_capacity_is_logged_next_to_16_bits(drive):
    found = drive({"tiers": 2}, [call([[1, 2, 3]], 1)])
    (line,) = [x for x in found["log"].splitlines() if "Lamina: 2.00 bits" in x]
    assert "requests of 2,048" in line and "16 bits:" in line


def test_two_bits_hold_more_than_six_times_the_tokens_of_16(drive, tmp_path):
    heads, dim = 8, 128
    model = build("Llama", head_dim=dim, num_attention_heads=heads, num_key_value_heads=heads)
    profile = calibrate(model, [tokens(2, 384, seed) for seed in (100, 101)], model_id="wide")
    model.save_pretrained(tmp_path / "wide")
    profile.save(tmp_path / "wide.profile")
    found = drive(
        {"profile": str(tmp_path / "wide.profile"), "tiers": 2}, [call([tokens(1, 200, 1)[0].tolist()], 4)],
        model=str(tmp_path / "wide"), dtype="bfloat16",
    )  # fmt: skip
    (line,) = [x for x in found["log"].splitlines() if "Lamina: 2.00 bits" in x]
    ours, pages, theirs = (
        int(re.search(what, line)[1].replace(",", ""))
        for what in (r"bits, ([\d,]+) tokens", r", (\d+) exact pages", r"16 bits: ([\d,]+) tokens")
    )
    shapes, window = [LayerShape(i, heads, 0, dim) for i in range(2)], WindowConfig(64, 256, 0)
    share = sizes(200 << 20, shapes, 2, [(2, 2)] * 2, "auto", exact_pages(window, 8, 4096))
    dense = 2 * 2 * heads * 64 * dim * 2
    assert (ours, pages) == (64 * found["blocks"], share.exact_pages) and share.blocks == found["blocks"]
    assert dense / share.block_bytes >= 6.5 and dense / (share.block_bytes + share.book_bytes) >= 6.5
    taken = share.blocks * (share.block_bytes + share.book_bytes) + pages * share.exact_bytes
    assert sum(found["stats"]["bytes"].values()) == taken <= 200 << 20
    assert theirs == taken // dense * 64
    # What requests of 32,768 tokens take, exact pages included.
    for batched in (2048, 8192):
        for n in range(1, 9):
            exact = exact_pages(window, n, batched) * share.exact_bytes
            times = n * 512 * dense / (n * 512 * (share.block_bytes + share.book_bytes) + exact)
            print(f"{batched} tokens a step, {n} requests: {times:.2f} times")
            assert times > 2
    assert times > 5


def test_an_engine_without_lamina_is_vllms_own(drive, exact):
    found = drive(None, [call(prompts()[:4], 8)])
    assert found["stats"] is None and first(found["answers"][0]) == [a[:8] for a in exact[:4]]
