"""``python -m holdfast.cli``, where the ``holdfast`` command is not on the path."""

from holdfast.cli import main

main()
