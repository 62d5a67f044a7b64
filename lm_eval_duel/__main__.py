"""The command `lm-eval-duel`, and `python -m lm_eval_duel`.

Ctrl-C ends a command with one line. `cli.main` prints it once it is imported; during that import it is printed here.
"""

import sys


def main() -> None:
    """Entry point of `lm-eval-duel`."""
    try:
        from lm_eval_duel.cli import main as program
    except KeyboardInterrupt:
        print("lm-eval-duel: stopped.", file=sys.stderr)
        sys.exit(130)  # as a shell reports SIGINT
    program.main()


if __name__ == "__main__":
    main()
