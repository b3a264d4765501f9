"""The ``ostinato`` command, also available as ``python -m ostinato``."""

import io
import os
import sys


def main() -> None:
    _open_streams()
    try:
        from ostinato.cli import app
    except KeyboardInterrupt:  # the imports take a moment; later, typer does the same
        sys.exit(130)
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(
            f"the ostinato command needs the package {error.name}: pip install 'ostinato[llm]'"
        )
    app(prog_name="ostinato")


def _open_streams() -> None:
    """Make streams that take any text: ``?`` for what the locale lacks, nothing if closed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


if __name__ == "__main__":
    main()
