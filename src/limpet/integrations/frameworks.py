"""What the integrations of the training frameworks share."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from typing import Any

from limpet.convert.arrange import numbered_name
from limpet.data.loader import DataLoader
from limpet.errors import InexactResume, LimpetError
from limpet.snapshot.location import Url
from limpet.text import warn_user
from limpet.threads import no_op
from limpet.training.checkpointer import Checkpointer


class StatePart:
    """A member of a state that functions read, write, and check.

    By default, its keys may differ from those of now. With ``keeps_per_rank``, each rank has its
    own, and a new rank begins with that of the first.
    """

    def __init__(
        self,
        read: Callable[[], Any],
        write: Callable[[Any], object],
        check: Callable[[Any], object] = no_op,
        *,
        keeps_per_rank: bool = False,
    ) -> None:
        self.state_dict, self.load_state_dict, self.check_state_dict = read, write, check
        self.keeps_per_rank = keeps_per_rank

    def derive(self, rank: int) -> None:
        """Begin on a rank that no version has."""


def number_members(kinds: Mapping[str, Iterable[Any]]) -> dict[str, Any]:
    """Return members of a state by names such as ``optimizer``, ``optimizer_1``, and so on."""
    return {numbered_name(k, i): m for k, found in kinds.items() for i, m in enumerate(found)}


def check_arguments(options: Mapping[str, Any], resume: Mapping[str, Any]) -> None:
    """Raise ``LimpetError`` for names of arguments that ``Checkpointer`` and its ``resume`` do not
    have, before the framework has begun to load anything."""
    for function, arguments in ((Checkpointer, options), (Checkpointer.resume, resume)):
        names = inspect.signature(function).parameters.keys() - {"self", "run", "state"}
        if unknown := sorted(arguments.keys() - names):
            raise LimpetError(f"{function.__qualname__} has no argument {unknown[0]}=")


def check_release(package: str, oldest: str, newest: str) -> None:
    """Warn if the release of a framework is not in the tested range, such as "2.5" to "2.6"."""
    found = version(package)
    if not _first_two(oldest) <= _first_two(found) <= _first_two(newest):
        warn_user(
            f"{package} {found} is installed, but Limpet is tested with {oldest} to {newest}: a"
            " resume may not be exact",
            InexactResume,
        )


def check_folder(run: Url, folder: str | None, use: str, *, is_error: bool = False) -> None:
    """Warn, or raise ``LimpetError``, if the run is a folder that has another use."""
    is_path = isinstance(run, str | os.PathLike)
    if folder and is_path and os.path.realpath(str(run)) == os.path.realpath(folder):
        text = f"{run} is the run and {use}: use different folders"
        if is_error:
            raise LimpetError(text)
        warn_user(text, UserWarning)


def check_sizes(loaders: Iterable[DataLoader]) -> None:
    """Raise ``LimpetError`` if a resume within an epoch has changed the samples of all ranks in a
    batch, for loops that count the batches of an epoch: they would skip samples."""
    for loader in loaders:
        now, before = loader.samples_per_step, loader.samples_per_step_before
        if before not in (None, now):
            raise LimpetError(
                f"The epoch has begun with {before} samples of all ranks in a batch, not {now}:"
                " keep the batch size, or pass total_batch_size= for another number of ranks"
            )


def check_accelerator(function: str, accelerator: Any) -> None:
    """Raise ``LimpetError`` if an ``Accelerator`` does not use DDP, FSDP2, or one process."""
    kind, config = accelerator.distributed_type.value, accelerator.parallelism_config
    kind = "FSDP1" if kind == "FSDP" and not accelerator.is_fsdp2 else kind
    kind = "tp_size, cp_size, sp_size" if getattr(config, "non_data_parallel_size", 1) > 1 else kind
    if not kind.startswith(("NO", "MULTI_")) and kind != "FSDP":
        raise LimpetError(f"{function}() supports DDP and FSDP2 of Accelerate, not {kind}")


def _first_two(release: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", release)[:2]]
