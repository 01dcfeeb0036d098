"""Run the commands as ``python -m limpet`` if ``limpet`` is not on the path."""

from limpet.cli import main

main()
