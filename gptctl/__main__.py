"""`python -m gptctl`, and the command `gptctl`."""


def main() -> None:
    try:
        from gptctl.cli import main as run

        run()
    except KeyboardInterrupt:  # while modules were loaded
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
