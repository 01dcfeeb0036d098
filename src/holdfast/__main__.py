"""Run the commands as ``python -m holdfast`` if ``holdfast`` is not on the path."""

from holdfast.cli import main

main()
