"""The controller's state: smoothed signals, decisions so far, and when to fire next."""

import copy
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lamina.codec import TIERS
from lamina.control.canary import Signals
from lamina.control.config import Canary, ControllerConfig, Policy, Schedule, TauRule
from lamina.control.policies import allocate, hysteresis, threshold, vote
from lamina.control.tau import sqrt_tau
from lamina.errors import ConfigError

Table = list[list[float]]
"""One row a layer and side, one number a tier."""

Reduce = Callable[[Table], Table]
"""Averages signals over ranks, so that every rank decides alike, NaN where one has none; the identity on one rank."""

FORMAT = "lamina-controller"
UNQUANTISED = 16
"""Bits of a layer that was never decided on, where rows are simulated."""


@dataclass
class Track:
    """What is remembered of one layer and side.

    Attributes
    ----------
    ema : dict
        Bits -> smoothed signal.
    decisions : list of int
        The last threshold decisions, oldest first.
    kept, below, quiet : int
        Firings since the tier changed; the lower tier that has been quiet, 0 for none; firings it has been.
    """

    ema: dict[int, float] = field(default_factory=dict)
    decisions: list[int] = field(default_factory=list)
    kept: int = 0
    below: int = 0
    quiet: int = 0

    @property
    def is_sound(self) -> bool:
        """Whether all fields have values that a run can give them."""
        known = set(self.ema) in (set(), set(TIERS)) and all(math.isfinite(x) for x in self.ema.values())
        counts = (self.kept, self.below, self.quiet)
        return known and all(type(n) is int for n in counts) and all(bits in TIERS for bits in self.decisions)


@dataclass(frozen=True)
class Firing:
    """One decision.

    Attributes
    ----------
    step : int
        Decode steps so far.
    context : int
        Longest running context.
    tau : float
        Threshold that held.
    signals, ema : list
        One row a layer and side (K, V alternating) of numbers by tier; empty where a layer gave no signal.
    tiers : list of (int, int)
        Bits of K and V from now on, one pair a layer.
    """

    step: int
    context: int
    tau: float
    signals: Table
    ema: Table
    tiers: list[tuple[int, int]]


class Controller:
    """Decides the tiers of each layer's K and V from measured drift.

    The state persists across requests: a request that starts is admitted at the tiers decided so far.

    Parameters
    ----------
    config : ControllerConfig
        Settings.
    tiers : sequence of (int, int)
        Bits of K and V before the first firing, one pair a layer.
    sizes : sequence of float, optional
        Elements of a token in each layer, for average bits; default equal.
    reduce : callable
        Averages signals over ranks.
    weights : sequence of (float, float), optional
        What the ``anchored`` signals of each layer's K and V are multiplied by, so that they say how far the model's
        output drifts and can be compared with one another (see :mod:`lamina.eval.tuning`); default 1.
    """

    def __init__(
        self,
        config: ControllerConfig,
        tiers: Sequence[tuple[int, int]],
        sizes: Sequence[float] | None = None,
        reduce: Reduce = lambda table: table,
        weights: Sequence[tuple[float, float]] | None = None,
    ) -> None:
        self.config = config
        self.tiers: list[tuple[int, int]] = [(int(k), int(v)) for k, v in tiers]
        if any(bits not in (*TIERS, UNQUANTISED) for pair in self.tiers for bits in pair):
            raise ConfigError(f"tiers {self.tiers} are not all of {', '.join(map(str, (*TIERS, UNQUANTISED)))} bits")
        self.sizes = list(sizes) if sizes is not None else [1.0] * len(self.tiers)
        if len(self.sizes) != len(self.tiers) or not all(size > 0 for size in self.sizes):
            raise ConfigError(f"sizes {self.sizes} are not {len(self.tiers)} positive numbers, one a layer")
        weighted = weights is not None and config.canary == Canary.ANCHORED
        self.weights = [(float(k), float(v)) for k, v in weights or ()] if weighted else [(1.0, 1.0)] * len(self.tiers)
        if len(self.weights) != len(self.tiers):
            raise ConfigError(f"{len(self.weights)} weights do not fit {len(self.tiers)} layers")
        self.reduce = reduce
        self.tracks = [Track() for _ in range(2 * len(self.tiers))]
        self.step = 0
        self.frozen = False
        self.random = random.Random(config.seed)

    @property
    def average_bits(self) -> float:
        """Average tier over layers and sides, weighted by size."""
        return sum((k + v) * size for (k, v), size in zip(self.tiers, self.sizes)) / (2 * sum(self.sizes))

    def fires(self, tokens: int = 1) -> bool:
        """Count ``tokens`` decode steps that are done in one call; whether signals should be taken in it."""
        before, self.step = self.step, self.step + tokens
        if self.config.schedule == Schedule.PERIODIC:
            due = int(self.step * self.config.rate + 1e-9) > int(before * self.config.rate + 1e-9)
        else:
            due = sum(self.random.random() < self.config.rate for _ in range(tokens)) > 0
        return due and not self.frozen

    def decide(self, signals: Mapping[int, Signals], context: int) -> Firing | None:
        """Take in the signals of one firing and choose tiers for pages that close from now on.

        Parameters
        ----------
        signals : mapping
            Layer -> its signals; layers without are left as they are.
        context : int
            Longest running context, in tokens.

        Returns
        -------
        Firing or None
            None if nothing was measured or the controller is frozen.
        """
        if self.frozen:
            return None
        # Ranks that measured nothing reduce too: others may have.
        table = self._checked(self.reduce(self._table(signals)))
        if not any(table):
            return None
        alpha = self.config.alpha
        for track, row in zip(self.tracks, table):
            for bits, value in zip(TIERS, row):
                old = track.ema.get(bits)
                track.ema[bits] = value if old is None else old + alpha * (value - old)
        tau = self._tau(context)
        before = list(self.tiers)
        self._choose(tau)
        for i, (old_pair, new_pair) in enumerate(zip(before, self.tiers)):
            for side in (0, 1):
                track = self.tracks[2 * i + side]
                track.kept = 0 if old_pair[side] != new_pair[side] else track.kept + 1
        ema = [[track.ema[bits] for bits in TIERS] if track.ema else [] for track in self.tracks]
        return Firing(self.step, context, tau, table, ema, list(self.tiers))

    def copy(self) -> "Controller":
        """A controller of its own with the same settings and state."""
        other = Controller(self.config, self.tiers, self.sizes, self.reduce, self.weights)
        other.load(self.snapshot())
        return other

    def freeze(self) -> None:
        """Stop all updates; the tiers stay."""
        self.frozen = True

    def snapshot(self) -> dict[str, Any]:
        """The whole state as JSON values."""
        state = self.random.getstate()
        return {
            "format": FORMAT,
            "config": asdict(self.config),
            "tiers": [list(pair) for pair in self.tiers],
            "tracks": [asdict(track) | {"ema": {str(b): x for b, x in track.ema.items()}} for track in self.tracks],
            "step": self.step,
            "frozen": self.frozen,
            "random": [state[0], list(state[1]), state[2]],
        }

    def load(self, snapshot: Mapping[str, Any]) -> None:
        """Go on from a snapshot of a controller with as many layers; the settings stay this one's."""
        if not isinstance(snapshot, Mapping) or snapshot.get("format") != FORMAT:
            raise ConfigError("this is no snapshot of a controller; take one with controller.snapshot()")
        try:
            tiers = [(int(k), int(v)) for k, v in snapshot["tiers"]]
            tracks = [
                Track(**{**t, "ema": {int(b): float(x) for b, x in t["ema"].items()}}) for t in snapshot["tracks"]
            ]
            version, words, gauss = snapshot["random"]
            generator = random.Random()
            generator.setstate((version, tuple(words), gauss))
            step, frozen = int(snapshot["step"]), snapshot["frozen"]
            if not isinstance(frozen, bool) or not all(track.is_sound for track in tracks):
                raise ValueError("a track or the frozen flag is not what it should be")
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ConfigError(f"the controller's snapshot is damaged ({error!r}); start without it") from error
        if len(tiers) != len(self.tiers) or len(tracks) != len(self.tracks):
            raise ConfigError(f"the snapshot has {len(tiers)} layers, the model {len(self.tiers)}")
        known = (*TIERS, *({UNQUANTISED} & {bits for pair in self.tiers for bits in pair}))
        if any(bits not in known for pair in tiers for bits in pair):
            raise ConfigError(f"the snapshot's tiers {tiers} are not all of {', '.join(map(str, TIERS))} bits")
        self.tiers, self.tracks, self.step, self.frozen = tiers, copy.deepcopy(tracks), step, frozen
        self.random = generator

    def _checked(self, table: Table) -> Table:
        """What a reduction returned, as numbers; rows with one that is not finite count as not measured."""
        try:
            rows = [[float(x) for x in row] for row in table]
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the reduction of signals returned no table of numbers ({error})") from error
        if len(rows) != len(self.tracks) or any(len(row) not in (0, len(TIERS)) for row in rows):
            raise ConfigError(
                f"the reduction of signals returned {len(rows)} rows, not {len(self.tracks)} of 0 or 3 numbers"
            )
        return [row if all(map(math.isfinite, row)) else [] for row in rows]

    def _table(self, signals: Mapping[int, Signals]) -> Table:
        table: Table = []
        for i in range(len(self.tiers)):
            found = signals.get(i)
            sides = () if found is None else zip((found.k, found.v), self.weights[i])
            table += [[w * x[b] for b in TIERS] for x, w in sides] or [[math.nan] * len(TIERS)] * 2
        return table

    def _tau(self, context: int) -> float:
        c = self.config
        return c.tau0 if c.tau_rule == TauRule.FIXED else sqrt_tau(c.tau0, context, c.tau_context)

    def _choose(self, tau: float) -> None:
        known = [i for i in range(len(self.tiers)) if self.tracks[2 * i].ema]
        sides = [(i, side) for i in known for side in ((0,) if self.config.tied else (0, 1))]
        if self.config.policy == Policy.ALLOCATE:
            chosen = allocate(
                [self.tracks[2 * i + side].ema for i, side in sides],
                [self.sizes[i] * (1 + self.config.tied) for i, _ in sides],
                self.config.target_bits,
                self.config.tiers,
            )
        else:
            chosen = [self._choose_one(self.tracks[2 * i + side], self.tiers[i][side], tau) for i, side in sides]
        for (i, side), bits in zip(sides, chosen):
            pair = [bits, bits] if self.config.tied else list(self.tiers[i])
            pair[side] = bits
            self.tiers[i] = (pair[0], pair[1])

    def _choose_one(self, track: Track, current: int, tau: float) -> int:
        c = self.config
        if c.policy == Policy.HYSTERESIS:
            calm = track.quiet + 1 >= c.patience and track.kept >= c.dwell
            chosen, below = hysteresis(
                track.ema, current, tau, c.tiers, c.fallback, calm=calm, demote_below=c.demote_below
            )
            track.quiet = track.quiet + 1 if below and below == track.below else int(bool(below))
            track.below = below or 0
            return chosen
        decision = threshold(track.ema, tau, c.tiers, c.fallback)
        if c.policy == Policy.THRESHOLD:
            return decision
        track.decisions = [*track.decisions, decision][-c.votes :]
        return vote(track.decisions)


def merge_tiers(vectors: Sequence[Sequence[tuple[int, int]]]) -> list[tuple[int, int]]:
    """Majority of several tier vectors, a layer and side at a time; ties go to more bits (EchoKV).

    Parameters
    ----------
    vectors : sequence
        Each one pair (K, V) a layer.
    """
    if not vectors or len({len(v) for v in vectors}) != 1:
        raise ConfigError(f"cannot merge tier vectors of {[len(v) for v in vectors]} layers")

    return [(vote([v[i][0] for v in vectors]), vote([v[i][1] for v in vectors])) for i in range(len(vectors[0]))]
