"""Fixtures of the tests of denoisers."""

import functools
from types import SimpleNamespace

import networks
import pytest


@pytest.fixture(scope="session")
def family(tmp_path_factory):
    """Of a name and options: its denoiser, plain logits and windows, its path and what was said to load it, once."""

    @functools.cache
    def find(name, **more):
        path, options, plainly = networks.made(tmp_path_factory.mktemp("family"), name)
        denoiser = networks.load(path, options, **more)
        logits = lambda ids, window: plainly(ids, window, denoiser)  # noqa: E731
        windows = list(networks.fitting(denoiser))
        options = {**options, **more}
        return SimpleNamespace(denoiser=denoiser, logits=logits, windows=windows, path=path, options=options)

    return find
