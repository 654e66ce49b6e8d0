"""What `triptych profile` does: measure, or load what was measured; save, plot, and tell what follows. Called by cli.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, TaskID

from triptych.services.profiler.plot import write_plot
from triptych.services.profiler.summary import as_json, print_summary, warnings
from triptych.shared.checkpoint import Checkpoint
from triptych.shared.console import table_console
from triptych.shared.cost_model.derived import TypicalRequest, derive, isolated_slo
from triptych.shared.cost_model.profile import Machine, Profile, read_profile, require_writable, write_profile
from triptych.shared.environment import process_environment
from triptych.shared.errors import BadRequest
from triptych.shared.machine import cpu_name, num_cores
from triptych.shared.settings import Settings

# chosen: a question about one picture; ShareGPT-4o's pictures have about 500 pixels a side
TYPICAL = TypicalRequest(num_text_tokens=200, num_output_tokens=100, num_images=1, image_width=512, image_height=512)


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """out: where a measured profile goes, and its plot beside it. load: use that profile instead of measuring. slo_factor:
    the SLO is that many times the latency of a typical request alone."""

    is_quick: bool
    out: Path
    load: Path | None
    slo_factor: float
    is_json: bool

    @property
    def plot(self) -> Path:
        return self.out.with_suffix(".svg")


def run_profile(
    settings: Settings, checkpoint: Checkpoint, preprocess: Callable[[bytes], object], options: ProfileOptions
) -> None:
    """Prints on stdout; warnings and the progress bar go to stderr.

    Args:
        preprocess: decodes and resizes an encoded picture for this checkpoint.

    Raises:
        BadRequest: the profile to load is of another model or machine, or something can't be measured, read or written.
    """
    machine = this_machine(settings)
    if options.load:
        profile = read_profile(options.load)
        profile.require_match(machine, checkpoint.revision)
    else:
        _require_room(options)
        profile = _measure(settings, checkpoint, machine, preprocess, options.is_quick)
        write_profile(profile, options.out)
        write_plot(profile, options.plot)
    model = profile.cost_model()
    derived = derive(model, TYPICAL, isolated_slo(model, TYPICAL, options.slo_factor))
    if options.is_json:
        document = {"profile": str(options.load or options.out), **as_json(profile, TYPICAL, derived)}
        sys.stdout.write(json.dumps(document) + "\n")
    else:
        print_summary(profile, TYPICAL, derived, table_console())
        if not options.load:
            sys.stdout.write(f"wrote {options.out} and {options.plot.name}\n")
    for line in warnings(profile):
        sys.stderr.write(f"warning: {line}\n")


def this_machine(settings: Settings) -> Machine:
    """What an instance with these settings would run on here."""
    if settings.device == "cuda":
        import torch  # deferred: seconds that a profile of a CPU does not need to be loaded

        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    else:
        name = cpu_name()
    num_threads = int(process_environment(settings, is_engine=True)["OMP_NUM_THREADS"])
    return Machine(settings.device, name, num_cores(), num_threads, settings.dtype)


def _require_room(options: ProfileOptions) -> None:
    """Before minutes of measuring: profile and plot can be written."""
    require_writable(options.out)
    if options.plot == options.out:
        raise BadRequest("--out is the profile, as JSON: name it other than .svg, the plot goes beside it", code="bad_setting")
    require_writable(options.plot)


def _measure(
    settings: Settings, checkpoint: Checkpoint, machine: Machine, preprocess: Callable[[bytes], object], is_quick: bool
) -> Profile:
    from triptych.services.profiler.run import Tools, measure_profile  # torch: a profile is loaded without it

    with _progress() as tick:
        return measure_profile(settings, checkpoint, machine, is_quick, Tools(preprocess, tick))


@contextmanager
def _progress() -> Iterator[Callable[[str, int], None]]:
    """A bar for each stage, on a terminal only."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks: dict[str, tuple[TaskID, int]] = {}

        def tick(stage: str, num_left: int) -> None:
            if stage not in tasks:
                total = num_left + 1
                tasks[stage] = (bars.add_task(stage, total=total), total)
            task, total = tasks[stage]
            bars.update(task, completed=total - num_left)

        yield tick
