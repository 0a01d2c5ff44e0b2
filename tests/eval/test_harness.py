"""The model that lm-evaluation-harness runs arms with."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from lamina.basis.profile import Profile
from lamina.engines.hf import LaminaCache, cache_kwarg
from lamina.errors import ConfigError, ProfileError
from lamina.eval.arms import ARMS
from lamina.pages import WindowConfig
from tiny_llama import make_model, make_tokenizer, save_tiny
from tiny_models import profile_of

pytest.importorskip("lm_eval")
pytest.importorskip("accelerate")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from lamina.eval import harness
from lamina.eval.harness import LaminaLM

NO_WINDOW = {"sink": 0, "recent": 0}
WINDOW = WindowConfig(**NO_WINDOW)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("harness")
    save_tiny(folder / "MODEL", folder / "model.profile", model_id="MODEL")
    return folder


@pytest.fixture
def profile(folder: Path) -> Profile:
    return Profile.load(folder / "model.profile")


def loaded(folder: Path, **options: Any) -> LaminaLM:
    """A class around a fresh model with sharper attention than random weights give, so that bits show."""
    options = {"profile": folder / "model.profile", "device": "cpu", **NO_WINDOW, **options}
    lm = LaminaLM(pretrained=str(folder / "MODEL"), **options)
    sharpen(lm.model)
    return lm


def sharpen(model: PreTrainedModel) -> PreTrainedModel:
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(6)
    return model


def text(n: int, seed: int) -> str:
    letters = torch.randint(97, 123, (n,), generator=torch.Generator().manual_seed(seed))
    return bytes(letters.tolist()).decode()


def requests(kind: Any, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


PAIRS = [(text(300, 1), text(100, 2)), (text(40, 3), text(150, 4)), ("", text(90, 5)), (text(201, 6), text(1, 7))]
"""Contexts and continuations: of different lengths, of more than a chunk, without a context, of one token."""


@torch.no_grad()
def by_hand(model: PreTrainedModel, cache: Any, context: str, continuation: str) -> tuple[float, bool]:
    """One request alone, a page of 64 tokens at a time."""
    tokenizer = make_tokenizer()
    before = tokenizer(context)["input_ids"] or [tokenizer.bos_token_id]
    after = tokenizer(continuation)["input_ids"]
    ids = torch.tensor([before + after])
    kwargs = cache_kwarg(model, cache)
    logits = [model(input_ids=chunk, **kwargs).logits[0] for chunk in ids[:, :-1].split(64, 1)]
    log_p = torch.cat(logits)[-len(after) :].log_softmax(-1)
    target = torch.tensor(after)
    return float(log_p.gather(1, target[:, None]).sum()), bool((log_p.argmax(-1) == target).all())


@pytest.mark.parametrize("arm", ["lamina-int2", "lamina-k4v2", "kivi-int2", "bf16"])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_log_likelihoods_are_those_of_each_request_alone(folder: Path, profile: Profile, arm: str, batch_size: int):
    lm = loaded(folder, arm=arm, batch_size=batch_size)
    found = lm.loglikelihood(requests("loglikelihood", *PAIRS), disable_tqdm=True)
    model, chosen = sharpen(make_model()), ARMS[arm]
    new = chosen.open(model, chosen.profile(profile), WINDOW)
    for (total, greedy), pair in zip(found, PAIRS):
        expected, is_greedy = by_hand(model, new(), *pair)
        assert total == pytest.approx(expected, abs=2e-3)
        assert greedy == is_greedy


def test_fewer_bits_give_other_numbers_once_pages_are_read(folder: Path):
    scores = {}
    short, long = (text(30, 1), text(20, 2)), (text(300, 3), text(100, 4))
    for arm in ("bf16", "lamina-int8", "lamina-int2"):
        lm = loaded(folder, arm=arm)
        found = lm.loglikelihood(requests("loglikelihood", short, long), disable_tqdm=True)
        scores[arm] = [total for total, _ in found]
    exact, eight, two = scores.values()
    assert two[0] == pytest.approx(exact[0], abs=0.02)
    assert abs(two[1] - exact[1]) > 1
    assert abs(eight[1] - exact[1]) < abs(two[1] - exact[1]) / 4


def test_bf16_scores_are_those_of_the_plain_model(folder: Path):
    """But for rows being rounded; log-likelihoods of a whole text too."""
    plain = HFLM(pretrained=str(folder / "MODEL"), device="cpu", batch_size=3)
    sharpen(plain.model)
    ours = loaded(folder, arm="bf16", batch_size=3)
    pairs, whole = requests("loglikelihood", *PAIRS), requests("loglikelihood_rolling", (PAIRS[0][0],))
    for (total, greedy), expected in zip(ours.loglikelihood(pairs), plain.loglikelihood(pairs)):
        assert total == pytest.approx(expected[0], rel=1e-3) and greedy == expected[1]
    assert ours.loglikelihood_rolling(whole) == pytest.approx(plain.loglikelihood_rolling(whole), rel=1e-3)


@pytest.mark.parametrize("arm", ["lamina-int2", "bf16"])
def test_generation_is_that_of_the_model_with_this_cache(folder: Path, profile: Profile, arm: str):
    """A batch of two, the shorter prompt padded on the left."""
    lm = loaded(folder, arm=arm, batch_size=2)
    prompts, options = (text(200, 8), text(137, 9)), {"until": ["</s>"], "max_gen_toks": 40, "temperature": 0.0}
    found = lm.generate_until(requests("generate_until", *((p, options) for p in prompts)), disable_tqdm=True)
    model, tokenizer, chosen = sharpen(make_model()), make_tokenizer(), ARMS[arm]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False)
    cache = chosen.cache(model, chosen.profile(profile), WINDOW)
    out = model.generate(**batch, max_new_tokens=40, do_sample=False, **cache_kwarg(model, cache))
    assert not bool(batch["attention_mask"].all())
    assert found == tokenizer.batch_decode(out[:, 200:], skip_special_tokens=True)


def test_a_controller_sees_all_requests_in_order(folder: Path, profile: Profile):
    pairs = sorted(PAIRS, key=lambda pair: len(pair[0]))
    lm = loaded(folder, arm="lamina-live-3")
    found = lm.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
    model = sharpen(make_model())
    new = ARMS["lamina-live-3"].open(model, profile, WINDOW)
    for (total, _), pair in zip(found, pairs):
        cache = new()
        cache.control.decode_tokens = 64
        assert total == pytest.approx(by_hand(model, cache, *pair)[0], abs=2e-3)
    ours, expected = lm.new_cache().controller, new().controller
    assert ours.tiers == expected.tiers != [(2, 2)] * 2
    read = [len(before or "s") + len(after) - 1 for before, after in pairs]
    assert ours.step == expected.step == sum(n - 64 for n in read), "the first chunk has no pages to measure"
    prompts = [(text(n, n), {"until": [], "max_gen_toks": 5}) for n in (70, 140)]
    assert len(lm.generate_until(requests("generate_until", *prompts), disable_tqdm=True)) == 2
    assert ours.step == expected.step + 2 * 4


def test_wrong_arguments_give_one_clear_error(folder: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"unknown arm 'int3'; choose from bf16, .*lamina-k4v2"):
        loaded(folder, arm="int3")
    with pytest.raises(ConfigError, match=r"no profile; add profile=FILE"):
        loaded(folder, profile=None)
    with pytest.raises(ProfileError, match=r"there is no profile at .*none\.profile"):
        loaded(folder, profile=tmp_path / "none.profile")
    with pytest.raises(ConfigError, match=r"recent=100 must be a non-negative multiple of 64"):
        loaded(folder, recent=100)
    for arm in ("lamina-live-3", "echokv"):
        with pytest.raises(ConfigError, match=rf"batch_size=auto: the controller of {arm} takes requests one by one"):
            loaded(folder, arm=arm, batch_size="auto")
    with pytest.raises(ConfigError, match="lamina-live needs a tuned profile"):
        loaded(folder, arm="lamina-live")


def test_a_profile_of_another_model_is_found_before_the_weights_are_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    profile_of("Llama").save(tmp_path / "other.profile")
    with pytest.raises(ProfileError, match="does not fit this model"):
        LaminaLM(pretrained=make_model(), tokenizer=make_tokenizer(), profile=tmp_path / "other.profile")
    monkeypatch.setattr(LaminaLM, "_create_model", lambda *args, **kwargs: pytest.fail("the weights were read"))
    with pytest.raises(ProfileError, match="does not fit this model"):
        loaded(folder, profile=tmp_path / "other.profile")


def write_task(folder: Path) -> None:
    """A task of the harness whose data set is a local file."""
    rows = [{"question": text(150 + 40 * i, i), "choices": [text(30, 50 + i), text(70, 80 + i)]} for i in range(4)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "local",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "0",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    (folder / "local.yaml").write_text(json.dumps(task))


def run_cli(
    folder: Path, out: Path, monkeypatch: pytest.MonkeyPatch, *options: str, model: str = "lamina", **arguments: Any
) -> None:
    words = ["lm_eval", "--model", model, "--tasks", "local", "--include_path", str(folder), "--device", "cpu"]
    named = "".join(f",{name}={value}" for name, value in arguments.items())
    words += ["--model_args", f"pretrained={folder / 'MODEL'}{named}", "--output_path", str(out), "--log_samples"]
    monkeypatch.setattr(sys, "argv", [*words, *options])
    harness.main()


def test_the_command_line_runs_a_task_of_a_local_file(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_task(folder)
    profile = folder / "model.profile"
    run_cli(folder, tmp_path, monkeypatch, "--batch_size", "3", profile=profile, arm="lamina-int2", sink=0, recent=64)
    (results,) = tmp_path.rglob("results_*.json")
    assert json.loads(results.read_text())["config"]["model"] == "lamina"
    (samples,) = tmp_path.rglob("samples_local_*.jsonl")
    found = {s["doc_id"]: s for s in map(json.loads, samples.read_text().splitlines())}
    model, window = make_model(), WindowConfig(sink=0, recent=64)
    for sample in found.values():
        for choice, ((total, _),) in zip(sample["doc"]["choices"], sample["resps"]):
            cache = LaminaCache(model, Profile.load(profile), tiers=2, window=window)
            expected = by_hand(model, cache, sample["doc"]["question"], choice)[0]
            assert float(total) == pytest.approx(expected, abs=1e-3)
    assert len(found) == 4


def test_on_the_command_line_bf16_is_the_harness_own_model(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_task(folder)
    run_cli(folder, tmp_path / "hf", monkeypatch, model="hf")
    run_cli(folder, tmp_path / "bf16", monkeypatch, profile=folder / "model.profile", arm="bf16")
    scores, found = [], []
    for name in ("hf", "bf16"):
        (results,) = (tmp_path / name).rglob("results_*.json")
        scores.append(json.loads(results.read_text())["results"]["local"]["acc,none"])
        (samples,) = (tmp_path / name).rglob("samples_local_*.jsonl")
        lines = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda s: s["doc_id"])
        found.append([float(total) for sample in lines for ((total, _),) in sample["resps"]])
    assert scores[0] == scores[1] and found[1] == pytest.approx(found[0], rel=1e-3)


def test_the_command_line_says_what_is_wrong_in_one_line(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_task(folder)
    with pytest.raises(SystemExit, match=r"^error: unknown arm 'int3'; choose from bf16"):
        run_cli(folder, tmp_path, monkeypatch, profile=folder / "model.profile", arm="int3")
