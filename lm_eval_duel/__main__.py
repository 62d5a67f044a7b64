"""`python -m lm_eval_duel`."""

from lm_eval_duel.cli.main import main

if __name__ == "__main__":
    main()
