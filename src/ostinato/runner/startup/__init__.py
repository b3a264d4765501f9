"""Start-up: from a configuration to a runner with captured graphs."""

from ostinato.runner.startup.build import build_runner as build_runner
from ostinato.runner.startup.build import load as load
