"""``python -m ostinato.cli``: the same as the ``ostinato`` command."""

from ostinato.cli import app

app()
