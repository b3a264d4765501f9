"""The ``ostinato`` command, also available as ``python -m ostinato``."""

import sys


def main() -> None:
    try:
        from ostinato.cli import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(
            f"the ostinato command needs the package {error.name}: pip install 'ostinato[llm]'"
        )
    app(prog_name="ostinato")


if __name__ == "__main__":
    main()
