"""Fixtures of the tests of denoisers."""

import functools
from types import SimpleNamespace

import networks
import pytest


@pytest.fixture(scope="session")
def family(tmp_path_factory):
    """Of a name and options: its denoiser, plain logits, layers and windows, once."""

    @functools.cache
    def find(name, **options):
        denoiser, logits, layers = networks.opened(name, tmp_path_factory.mktemp("family"), **options)
        windows = list(networks.fitting(denoiser))
        return SimpleNamespace(denoiser=denoiser, logits=logits, layers=layers, windows=windows)

    return find
