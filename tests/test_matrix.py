"""Every arm does everything that the engine does: one cell an arm and feature.

A cell runs a tiny model with small windows, so that pages are packed early, and compares with fresh runs of the same
arm. A tolerance is a small part of what the arm's own codes change in the logits: rows that differ in the last bit of a
product may fall on the other side of a rounding border, and nothing else may differ.
"""

import tempfile
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache as memoised
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from helpers import check_slots, page_contents
from lamina.basis.calibrate import calibrate
from lamina.basis.profile import Profile
from lamina.engines.hf import LaminaCache, cache_kwarg
from lamina.errors import CacheStateError
from lamina.eval.arms import ARMS, Arm, EchoArm, LiveArm
from lamina.eval.bf16 import Bf16Cache
from lamina.eval.kivi import KiviCache
from lamina.pages import LayerStore, WindowConfig
from tiny_models import PAD, build, logits_of, tokens

WINDOW = WindowConfig(64, 64, 64)
CALM = {"initializer_range": 0.05}
"""Attention that no single row decides, so that greedy margins are wider than INT8's error."""

TOLERANCE = {16: 5e-4, 8: 1e-4, 4: 1e-3, 2: 4e-3}
"""Of a logit, by the arm's fewest bits; the codes themselves change logits by up to 0.002, 0.001, 0.03 and 0.14."""


@memoised
def model() -> PreTrainedModel:
    return build("Llama", **CALM)


@memoised
def profile_of(arm: str) -> Profile:
    made = calibrate(model(), [tokens(2, 384, seed) for seed in (100, 101)], model_id="Llama")
    return ARMS[arm].profile(made)


@dataclass(frozen=True)
class Make:
    """The cache factory of an arm."""

    arm: Arm

    def __call__(self) -> Any:
        return self.arm.cache(model(), self.profile, WINDOW)

    @property
    def profile(self) -> Profile:
        return profile_of(self.arm.name)

    @property
    def bits(self) -> int:
        return min(self.arm.tiers)

    @property
    def keeps_all_rows(self) -> bool:
        """Whether a roll-back of any length finds exact rows."""
        return self.bits == 16 or self.arm.simulated


Feature = Callable[[PreTrainedModel, Make], None]
FEATURES: dict[str, Feature] = {}

NOT_APPLICABLE: dict[tuple[str, str], str] = {
    ("bf16", "row_added"): "transformers' own caches cannot take in another cache's sequences",
    ("bf16", "save_and_load"): "transformers' own caches have no file format",
}
"""(arm, feature) -> why the cell is empty."""


def feature(function: Feature) -> Feature:
    FEATURES[function.__name__] = function
    return function


# ----------------------------------------------------------------------------------------------------------- building
def feed(net: PreTrainedModel, cache: Any, ids: Tensor, cuts: Sequence[int] = (), mask: Tensor | None = None) -> Tensor:
    """Logits of tokens that are fed in pieces; ``mask`` covers the tokens before them as well."""
    spans, out = pairwise([0, *cuts, ids.shape[1]]), []
    before = mask.shape[1] - ids.shape[1] if mask is not None else 0
    positions = (mask.cumsum(1) - 1).clamp(min=0) if mask is not None else None
    for a, b in spans:
        options: dict[str, Any] = {}
        if mask is not None and positions is not None:
            options = {"attention_mask": mask[:, : before + b], "position_ids": positions[:, before + a : before + b]}
        out.append(logits_of(net, ids[:, a:b], **options, **cache_kwarg(net, cache)))
    return torch.cat(out, 1)


def generate(net: PreTrainedModel, cache: Any, ids: Tensor, n: int, **options: Any) -> Any:
    return net.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, pad_token_id=PAD, return_dict_in_generate=True,
        **{"do_sample": False} | options, **cache_kwarg(net, cache),
    )  # fmt: skip


def close(ours: Tensor, expected: Tensor, make: Make, factor: float = 1.0) -> None:
    torch.testing.assert_close(ours, expected, rtol=0, atol=TOLERANCE[make.bits] * factor)


def consistent(cache: Any) -> None:
    """Every slot of every layer is used or free, once."""
    for layer in cache.layers:
        if isinstance(getattr(layer, "store", None), LayerStore):
            check_slots(layer.store)


def packed_pages(cache: Any, sequence: int = 0) -> int:
    """Pages that have no exact rows."""
    return sum("exact" not in page for page in page_contents(cache.layers[0].store, sequence))


def padded_equals_alone(net: PreTrainedModel, make: Make, counts: list[list[int]]) -> Any:
    """Feed chunks of which sequence b has ``counts[b][c]`` tokens, padded on the left; compare with b alone."""
    widths = [max(chunk) for chunk in zip(*counts)]
    rows = [tokens(1, sum(c), seed=20 + b) for b, c in enumerate(counts)]
    ids = torch.full((len(counts), sum(widths)), PAD)
    for b, (row, count) in enumerate(zip(rows, counts)):
        for piece, end in zip(row.split(count, 1), accumulate(widths)):
            ids[b, end - piece.shape[1] : end] = piece[0]
    mask, cuts = (ids != PAD).long(), list(accumulate(widths))[:-1]
    cache = make()
    together = feed(net, cache, ids, cuts, mask)
    consistent(cache)
    for b, (row, count) in enumerate(zip(rows, counts)):
        alone = feed(net, make(), row, list(accumulate(n for n in count if n))[:-1])
        close(together[b, mask[b].bool()], alone[0], make)
    return cache


# ----------------------------------------------------------------------------------------------------------- features
@feature
def left_padding(net: PreTrainedModel, make: Make) -> None:
    cache = padded_equals_alone(net, make, [[n, 1, 1, 30, 1, 1] for n in (3, 40, 300)])
    assert cache.get_seq_length() == 334
    if isinstance(cache, LaminaCache):
        assert cache.lengths == [37, 74, 334]


@feature
def padding_fills_the_first_chunk_of_a_row(net: PreTrainedModel, make: Make) -> None:
    padded_equals_alone(net, make, [[0, 0, 3, 1, 5], [0, 20, 100, 1, 70], [100, 100, 100, 1, 70]])


@feature
def padding_fills_the_first_chunk_of_all_rows(net: PreTrainedModel, make: Make) -> None:
    ids, mask = tokens(2, 300), torch.ones(2, 300, dtype=torch.long)
    mask[0, :150], mask[1, :120] = 0, 0
    cache = make()
    ours = feed(net, cache, ids, [60, 61, 100, 290], mask)
    for b, n in ((0, 150), (1, 120)):
        alone = feed(net, make(), ids[b : b + 1, n:], [290 - n])
        close(ours[b, n:], alone[0], make)


@feature
def padding_in_the_middle(net: PreTrainedModel, make: Make) -> None:
    padded_equals_alone(net, make, [[40, 1, 1, 90, 1, 1], [120, 1, 1, 3, 1, 1], [150, 1, 1, 130, 1, 1]])


@feature
def beams(net: PreTrainedModel, make: Make) -> None:
    """Three beams on one prefix, read once; the chosen one is what a fresh run of its tokens gives."""
    ids, known, n = tokens(1, 260, seed=3), 200, 24
    searched = []
    for cache in (make(), DynamicCache()):
        feed(net, cache, ids[:, :known])
        cache.batch_repeat_interleave(3)
        found = generate(net, cache, ids, n, num_beams=3, output_logits=True, output_scores=True)
        searched.append(found)
        consistent(cache)
    found = searched[0]
    parents = found.beam_indices[0, :n].tolist()
    assert len(set(parents)) > 1, "beams were reordered"
    chosen = torch.stack([step[beam] for step, beam in zip(found.logits, parents)])
    cuts = [known, *range(260, 260 + n - 1)]
    fresh = feed(net, make(), found.sequences[:, : 260 + n - 1], cuts)[0, 259:]
    close(chosen, fresh, make)
    if make.bits >= 8:
        assert torch.equal(found.sequences, searched[1].sequences)


def left_padded(lengths: Sequence[int], seed: int) -> tuple[Tensor, Tensor]:
    """Random prompts of these lengths, padded on the left, and their mask."""
    ids, width = tokens(len(lengths), max(lengths), seed), max(lengths)
    mask = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long()
    return ids.masked_fill(mask == 0, PAD), mask


def grown(mask: Tensor, n: int) -> Tensor:
    """A mask for n more tokens, all real."""
    return torch.nn.functional.pad(mask, (0, n), value=1)


def continued(net: PreTrainedModel, make: Make, act: Callable[[Any], Any], rows: list[int]) -> None:
    """After ``act`` the cache of three padded sequences goes on as a fresh one of the sequences ``rows``."""
    (prompts, mask), new = left_padded((250, 180, 240), seed=4), tokens(len(rows), 80, seed=5)
    cache, fresh = make(), make()
    feed(net, cache, prompts, [240], mask)
    act(cache)
    feed(net, fresh, prompts[rows], [240], mask[rows])
    longer = grown(mask[rows], 80)
    for cuts in ([], [1, 2, 42]):
        close(feed(net, cache, new, cuts, longer), feed(net, fresh, new, cuts, longer), make)
        longer = grown(longer, 80)
    assert cache.get_seq_length() == fresh.get_seq_length() == 410
    consistent(cache)


@feature
def reorder(net: PreTrainedModel, make: Make) -> None:
    continued(net, make, lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0])


@feature
def select(net: PreTrainedModel, make: Make) -> None:
    continued(net, make, lambda cache: cache.batch_select_indices(torch.tensor([1])), [1])


@feature
def repeat(net: PreTrainedModel, make: Make) -> None:
    continued(net, make, lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2])


@feature
def row_removed(net: PreTrainedModel, make: Make) -> None:
    """A sequence leaves the batch between decode steps; the others do not notice."""
    ids = tokens(3, 330, seed=6)
    cache = make()
    before = feed(net, cache, ids[:, :260], [250, 251])
    cache.batch_select_indices(torch.tensor([0, 2]))
    after = feed(net, cache, ids[[0, 2], 260:], [1, 2, 60])
    for i, b in enumerate((0, 2)):
        alone = feed(net, make(), ids[b : b + 1], [250, 251, 260, 261, 262, 320])
        close(torch.cat([before[b], after[i]]), alone[0], make)


@feature
def row_added(net: PreTrainedModel, make: Make) -> None:
    """Requests with shorter prompts join a running batch, and go on in their own cache too."""
    running, (joining, mask) = tokens(2, 330, seed=7), left_padded((100, 60), seed=8)
    new = tokens(2, 70, seed=24)
    cache, other = make(), make()
    feed(net, cache, running[:, :260], [250])
    feed(net, other, joining, [99], mask)
    cache.add(other)
    together = torch.cat([torch.ones(2, 260).long(), torch.nn.functional.pad(mask, (160, 0))])
    ours = feed(net, cache, torch.cat([running[:, 260:], new]), [1, 2, 60], grown(together, 70))
    assert cache.lengths == [330, 330, 170, 130]
    consistent(cache)
    for b in (0, 1):
        close(ours[b], feed(net, make(), running[b : b + 1], [250, 260, 261, 262, 320])[0, 260:], make)
    for b, n in ((0, 100), (1, 60)):
        alone = torch.cat([joining[b : b + 1, 100 - n :], new[b : b + 1]], 1)
        close(ours[2 + b], feed(net, make(), alone, [n - 1, n, n + 1, n + 2, n + 60])[0, n:], make)
    close(feed(net, other, new, [1, 2, 60], grown(mask, 70)), ours[2:], make)


def cropped(to: int) -> Feature:
    def crop(net: PreTrainedModel, make: Make) -> None:
        old, new = tokens(2, 400, seed=9), tokens(2, 72, seed=10)
        cache, fresh = make(), make()
        feed(net, cache, old, [310, 390])
        cache.crop(to - 400)
        assert cache.get_seq_length() == to
        ours = feed(net, cache, new, [1, 2, 70])
        assert cache.get_seq_length() == to + 72
        consistent(cache)
        feed(net, fresh, old[:, :to], [n for n in (310, 390) if n < to])
        expected = feed(net, fresh, new, [1, 2, 70])
        if make.keeps_all_rows or to <= WINDOW.sink or to >= 400 - WINDOW.rollback:
            close(ours, expected, make)
        else:
            assert bool(torch.isfinite(ours).all())
            if make.bits == 8:
                close(ours, expected, make, factor=50)

    return crop


for length in (1, 63, 64, 65, 130, 300, 336, 399):
    FEATURES[f"crop_to_{length}_of_400"] = cropped(length)


def drafts_change_nothing(net: PreTrainedModel, make: Make, **options: Any) -> None:
    """The prompt lies within the windows: transformers reads the first drafts with it, in one chunk and so exactly."""
    ids = tokens(1, 20, seed=1).repeat(1, 5)
    expected = generate(net, make(), ids, 130).sequences
    cache = make()
    ours = generate(net, cache, ids, 130, **options).sequences
    assert torch.equal(ours, expected)
    assert cache.get_seq_length() >= ours.shape[1] - 1
    consistent(cache)


@feature
def drafts_of_the_same_model(net: PreTrainedModel, make: Make) -> None:
    drafts_change_nothing(net, make, assistant_model=draft_model(0))


@feature
def drafts_of_a_bad_model(net: PreTrainedModel, make: Make) -> None:
    drafts_change_nothing(net, make, assistant_model=draft_model(5))


@feature
def drafts_of_the_prompt(net: PreTrainedModel, make: Make) -> None:
    drafts_change_nothing(net, make, prompt_lookup_num_tokens=7)


def draft_model(seed: int) -> PreTrainedModel:
    draft = build("Llama", seed=seed, **CALM)
    draft.generation_config.num_assistant_tokens = 6
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    return draft


@feature
def copies(net: PreTrainedModel, make: Make) -> None:
    """A copy and the cache it was taken of go their own ways."""
    ids = tokens(2, 280, seed=11)
    turns = [tokens(2, 90, seed=12), tokens(2, 90, seed=13)]
    first = make()
    feed(net, first, ids, [270])
    second = deepcopy(first)
    ours: list[list[Tensor]] = [[], []]
    for a, b in pairwise([0, 1, 2, 60, 90]):
        for cache, turn, out in zip((first, second), turns, ours):
            out.append(feed(net, cache, turn[:, a:b]))
    for out, turn in zip(ours, turns):
        fresh = feed(net, make(), torch.cat([ids, turn], 1), [270, 280, 281, 282, 340])[:, 280:]
        close(torch.cat(out, 1), fresh, make)
    for cache in (first, second):
        consistent(cache)


@feature
def several_questions(net: PreTrainedModel, make: Make) -> None:
    """Two texts are read once; every question, and the first one again, is answered from there."""
    (text, mask), questions = left_padded((290, 250), seed=14), [tokens(2, n, seed=15 + n) for n in (5, 70, 150, 5)]
    cache = make()
    feed(net, cache, text, mask=mask)
    kept = cache.snapshot() if isinstance(cache, LaminaCache) else deepcopy(cache)
    for question in questions:
        n = question.shape[1]
        ours = feed(net, cache, question, [n - 2], grown(mask, n))
        fresh = make()
        feed(net, fresh, text, mask=mask)
        close(ours, feed(net, fresh, question, [n - 2], grown(mask, n)), make)
        if isinstance(cache, LaminaCache):
            cache.restore(kept)
        else:
            cache = deepcopy(kept)
        assert cache.get_seq_length() == 290
    consistent(cache)


@feature
def save_and_load(net: PreTrainedModel, make: Make) -> None:
    ids, new = tokens(2, 300, seed=16), tokens(2, 70, seed=17)
    cache = make()
    feed(net, cache, ids)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kept.cache"
        if isinstance(cache, KiviCache):
            with pytest.raises(CacheStateError, match="simulated cache cannot be saved"):
                cache.save(path)
            return
        cache.save(path)
        loaded = LaminaCache.load(path, net, make.profile)
    for mine, theirs in zip(cache.ours, loaded.ours, strict=True):
        assert [page_contents(mine.store, b) for b in (0, 1)] == [page_contents(theirs.store, b) for b in (0, 1)]
    assert torch.equal(feed(net, loaded, new, [1, 2, 60]), feed(net, cache, new, [1, 2, 60]))
    assert loaded.tiers == cache.tiers == (make.arm.tiers,) * 2
    consistent(loaded)


@feature
def sampling_repeats_with_its_seed(net: PreTrainedModel, make: Make) -> None:
    ids, drawn = tokens(2, 260, seed=18), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(generate(net, make(), ids, 20, do_sample=True).sequences)
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


@memoised
def compiled() -> Any:
    """Graphs without generated code: what is tested is where they break."""
    return torch.compile(model(), backend="eager")


@feature
def compiled_model(net: PreTrainedModel, make: Make) -> None:
    ids, cuts = tokens(2, 290, seed=19), [200, 201, 202, 280]
    expected = feed(net, make(), ids, cuts)
    with torch._dynamo.config.patch(recompile_limit=256, accumulated_recompile_limit=10_000):
        spans = pairwise([0, *cuts, 290])
        cache = make()
        with torch.no_grad():
            ours = [compiled()(input_ids=ids[:, a:b], **cache_kwarg(net, cache)).logits for a, b in spans]
    close(torch.cat(ours, 1), expected, make)


@feature
def reset_and_reuse(net: PreTrainedModel, make: Make) -> None:
    cache = make()
    feed(net, cache, tokens(1, 300, seed=20))
    cache.reset()
    assert cache.get_seq_length() == 0 and sum(cache.memory().values()) == 0
    ids = tokens(2, 300, seed=21)
    assert torch.equal(feed(net, cache, ids, [250, 251]), feed(net, make(), ids, [250, 251]))
    consistent(cache)


@feature
def two_live_caches(net: PreTrainedModel, make: Make) -> None:
    ids = [tokens(2, 300, seed=22), tokens(1, 300, seed=23)]
    makes, cuts = (make, Make(ARMS["lamina-k4v2"])), [200, 201, 270]
    expected = [feed(net, m(), x, cuts) for m, x in zip(makes, ids)]
    caches = [m() for m in makes]
    ours: list[list[Tensor]] = [[], []]
    for a, b in pairwise([0, *cuts, 300]):
        for cache, x, out in zip(caches, ids, ours):
            out.append(feed(net, cache, x[:, a:b]))
    for out, want in zip(ours, expected):
        assert torch.equal(torch.cat(out, 1), want)


# -------------------------------------------------------------------------------------------------------------- tests
FIXED = {name: arm for name, arm in ARMS.items() if not isinstance(arm, LiveArm | EchoArm)}
"""Arms whose rows do not depend on what else is in the batch; a controller decides for all of it."""

CELLS = [(arm, name) for name in FEATURES for arm in FIXED if (arm, name) not in NOT_APPLICABLE]


@pytest.mark.parametrize(("arm", "name"), CELLS, ids=[f"{name}-{arm}" for arm, name in CELLS])
def test_every_arm_has_every_feature(arm: str, name: str) -> None:
    FEATURES[name](model(), Make(ARMS[arm]))


def test_cells_that_are_empty_have_nothing_to_run() -> None:
    assert set(NOT_APPLICABLE) <= {(arm, name) for arm in FIXED for name in FEATURES}
    assert not hasattr(Bf16Cache, "add") and not hasattr(Bf16Cache, "save") and not hasattr(Bf16Cache, "load")


@pytest.mark.parametrize("arm", [name for name, arm in FIXED.items() if not Make(arm).keeps_all_rows])
def test_the_lengths_of_the_cells_are_long_enough_to_pack_pages(arm: str) -> None:
    cache = Make(ARMS[arm])()
    feed(model(), cache, tokens(1, 330))
    assert packed_pages(cache) == 2
