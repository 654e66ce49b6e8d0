"""A profile: what the stages cost on one machine with one model, as `triptych profile` measured and fitted it, in one file.

The file is JSON, versioned, read with all its types checked. Whoever plans with a profile first asks `require_match`; an
emulation of another machine reads it as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec

from triptych.shared.checkpoint import ImageOptions
from triptych.shared.cost_model.api import CostModel
from triptych.shared.cost_model.forms import MemoryCosts, NotNegative, PassCosts, PassWork, PreprocessCosts
from triptych.shared.cost_model.images import NativeResolution
from triptych.shared.cost_model.unknowns import LinkCosts, Unknowns
from triptych.shared.errors import BadRequest

VERSION = 1  # of the file; changes when an old one can't be read as if it were new


@dataclass(frozen=True, slots=True)
class TimedPass:
    """One pass that was timed; for preprocess, one picture, whose pixels are the tokens."""

    work: PassWork
    seconds: Annotated[float, msgspec.Meta(gt=0)]
    is_held_out: bool = False


@dataclass(frozen=True, slots=True)
class FitError:
    """Relative errors of predictions, |predicted / measured - 1|."""

    num_points: int
    median: NotNegative
    p95: NotNegative


@dataclass(frozen=True, slots=True)
class StageProfile:
    """costs: fitted to the points that are not held out. error: of the predictions for those that are."""

    costs: PassCosts
    error: FitError
    points: Annotated[tuple[TimedPass, ...], msgspec.Meta(min_length=1)]


@dataclass(frozen=True, slots=True)
class Machine:
    """What times depend on besides the model. device: cpu or cuda; name: of the CPU or the GPU; num_threads: torch's."""

    device: str
    name: str
    num_cores: int
    num_threads: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.name}, {self.num_cores} cores, {self.num_threads} threads, {self.dtype}"


@dataclass(frozen=True, slots=True)
class ProfiledModel:
    """Which checkpoint. revision: as in Checkpoint, equal for equal answers."""

    name: str
    revision: str
    images: ImageOptions


@dataclass(frozen=True, slots=True)
class Profile:
    """See the module's docstring. measured_at: UTC, ISO 8601. link: how KV gets from one instance to another on this machine,
    messages not included; profiles of before it was measured have what is chosen."""

    version: int
    measured_at: str
    machine: Machine
    model: ProfiledModel
    memory: MemoryCosts
    preprocess: StageProfile
    encode: StageProfile
    prefill: StageProfile
    decode: StageProfile
    link: LinkCosts = Unknowns().local

    def stages(self) -> list[tuple[str, StageProfile]]:
        """In the order that a request takes."""
        names = ("preprocess", "encode", "prefill", "decode")
        return list(zip(names, (self.preprocess, self.encode, self.prefill, self.decode), strict=True))

    def require_match(self, machine: Machine, revision: str) -> None:
        """Raises BadRequest, in one line, when this was measured on another machine or with another model."""
        self.require_model(revision)
        if self.machine != machine:
            raise BadRequest(
                f"this profile is of another machine ({self.machine}), this is {machine}; run `triptych profile` here",
                code="wrong_profile",
            )

    def require_model(self, revision: str) -> None:
        """Raises BadRequest, in one line, when this was measured with another model."""
        if self.model.revision != revision:
            raise BadRequest(
                f"this profile is of another model: {self.model.name}, revision {self.model.revision[:12]}, "
                f"not {revision[:12]}; run `triptych profile` for this one",
                code="wrong_profile",
            )

    def cost_model(self, unknowns: Unknowns | None = None) -> CostModel:
        """What was measured, in the form that everything asks."""
        preprocess = self.preprocess.costs
        return CostModel(
            name=f"{self.model.name} on {self.machine.name}",
            source="measured",
            architecture="DecOnly",  # the engine has no other yet
            tp=1,
            images=NativeResolution(self.model.images),
            preprocess=PreprocessCosts(preprocess.fixed_s, preprocess.token_s),
            encode=self.encode.costs,
            prefill=self.prefill.costs,
            decode=self.decode.costs,
            memory=self.memory,
            unknowns=replace(unknowns or Unknowns(), local=self.link),
        )


def require_writable(path: Path) -> None:
    """For those who measure for minutes before they write. What is there stays.

    Raises:
        BadRequest: the file can't be written.
    """
    try:
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise BadRequest(f"cannot write {path.name or path}: {error.strerror}", code="bad_setting") from error


def write_profile(profile: Profile, path: Path) -> None:
    """As JSON with line breaks, so that two of them can be compared.

    Raises:
        BadRequest: the file can't be written.
    """
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
    except OSError as error:
        raise BadRequest(f"cannot write the profile: {path.name}: {error.strerror}", code="bad_setting") from error


def read_profile(path: Path) -> Profile:
    """A profile of any machine and model.

    Raises:
        BadRequest: there is none, or it is broken, or of another version; in one line.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BadRequest(f"cannot read the profile: {path.name}: {error.strerror}", code="bad_setting") from error
    try:
        version = msgspec.json.decode(content, type=_Versioned).version
        if version != VERSION:
            raise BadRequest(
                f"{path.name} is a profile of version {version}, this is version {VERSION}: run `triptych profile` again",
                code="wrong_profile",
            )
        profile = msgspec.json.decode(content, type=Profile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"{path.name} is not a profile: {error}", code="wrong_profile") from error
    for name, stage in profile.stages():
        if not all(stage.costs.pass_s(point.work) > 0 for point in stage.points):
            raise BadRequest(f"{path.name} is not a profile: passes of {name} cost nothing in it", code="wrong_profile")
    return profile


@dataclass(frozen=True, slots=True)
class _Versioned:
    """The part of a profile of any version that tells which."""

    version: int
