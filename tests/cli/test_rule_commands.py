"""`presets`: what it prints, and what it refuses."""

import pytest

from lm_eval_duel.cli.main import main
from lm_eval_duel.rules.presets import ENTRIES


def test_presets_prints_the_table(capsys):
    main(["presets"])
    printed = " ".join(capsys.readouterr().out.split())
    assert all(preset.name in printed and preset.written_out in printed for preset in ENTRIES)
    main(["presets", "llada2", "llada"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "From ML-GSAI/LLaDA@b7e6c35 generate.py L44-121 (steps may be changed)" in printed
    assert "dparallel" not in printed
    with pytest.raises(SystemExit, match="Did you mean llada2"):
        main(["presets", "lada2"])
