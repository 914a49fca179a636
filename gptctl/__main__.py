"""`python -m gptctl`, and the command `gptctl`."""

import gc
import os.path
import sys

# Objects between two searches for garbage. Modules and rows stay until the end: looking through
# them every 700 objects, as Python does, takes a tenth of a short command.
GARBAGE = 50_000


def main() -> None:
    gc.set_threshold(GARBAGE)
    try:
        use_bundled_trainer()
        from gptctl.cli import main as run

        run()
    except KeyboardInterrupt:  # while modules were being imported
        raise SystemExit(130) from None


def use_bundled_trainer() -> None:
    """Import the `trainer` next to this package, whatever the current folder or PYTHONPATH holds.

    `trainer` is a common name: a folder called like that must not replace ours.
    """
    parent = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    sys.path.insert(0, parent)
    import trainer  # noqa: F401

    sys.path.remove(parent)


if __name__ == "__main__":
    main()
