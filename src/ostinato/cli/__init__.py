"""The ``ostinato`` command. Each module here holds the commands of one kind."""

from ostinato.cli.app import app as app
