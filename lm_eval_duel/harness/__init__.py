"""The model that lm-evaluation-harness sees. Every interpreter start imports this file, so it imports nothing."""

MODELS = {"duel-mdm": "lm_eval_duel.harness.lm:DuelMDM"}  # the names under which lm-eval knows our models
