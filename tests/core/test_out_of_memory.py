"""Memory that runs out while a step is added: it is added once, wherever that happens."""

import pytest
import torch
from laws import numbers, strings
from noised_toys import NoisyToy
from torch.utils._python_dispatch import TorchDispatchMode
from toys import Toy

from lm_eval_duel.core.reveal import ScoreAccumulator
from lm_eval_duel.core.windows import Window
from lm_eval_duel.estimators.arguments import ConfidenceArguments, ElboArguments, LatticeArguments, NoisedElboArguments
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.estimators.elbo import BoundAccumulator, Elbo
from lm_eval_duel.estimators.lattice import Lattice, LatticeAccumulator
from lm_eval_duel.estimators.noised_elbo import NoisedElbo
from lm_eval_duel.estimators.order_sums import SetAccumulator
from lm_eval_duel.estimators.sampled_confidence import SampledConfidence


class Flat(Toy):
    """A network of which nearly every step is a near tie."""

    def __init__(self):
        super().__init__()
        self.out = self.out * 1e-5


class Short(TorchDispatchMode):
    """The memory runs out at operation number `at`. A sum into what exists takes none."""

    def __init__(self, at):
        super().__init__()
        self.at, self.count = at, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.index_add_.default:
            self.count += 1
            if self.count == self.at + 1:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return func(*args, **(kwargs or {}))


CASES = {
    "scores": (ScoreAccumulator, lambda: DuelEstimator(Flat(), "threshold:mu=0.4", 3, traced=True)),
    "elbo": (BoundAccumulator, lambda: Elbo(Toy(), ElboArguments(16))),
    "noised": (BoundAccumulator, lambda: NoisedElbo(NoisyToy(length=6), NoisedElboArguments(16, 2))),
    "lattice": (
        LatticeAccumulator,
        lambda: Lattice(Flat(), arguments=LatticeArguments(["greedy", "threshold:mu=0.4"]), block=3, traced=True),
    ),
    "sets": (SetAccumulator, lambda: SampledConfidence(Toy(), arguments=ConfidenceArguments(n=1), block=3)),
}


@pytest.mark.parametrize("stride", [11, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_a_step_is_added_once_at_whatever_operation_memory_runs_out(name, stride, monkeypatch):
    windows = [Window((), target) for target in strings(3, 3)[::11]]
    kind, make = CASES[name]
    expected, whole = numbers(make().log_prob(windows)), kind.add
    for at in range(0, 1000, stride):
        short = []

        def add(self, *step, at=at, short=short):
            if short:
                return whole(self, *step)
            short.append(Short(at))
            with short[0]:
                return whole(self, *step)

        monkeypatch.setattr(kind, "add", add)
        assert numbers(make().log_prob(windows)) == pytest.approx(expected, abs=1e-12, nan_ok=True), at
        if short[0].count <= at:  # it did not run out any more
            break
    assert 3 < at < 990
