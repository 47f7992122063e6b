"""`python -m deepinfer_cli` is `dix`."""

from deepinfer_cli.main import run

run()
