"""A model checkpoint as the torch-free processes see it: where it is, what it is, and how it sizes images.

Every process opens it: the router for tokenizer and card, preprocess for image sizes, instances to load weights. No torch.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blake3 import blake3

from triptych.shared.errors import BadRequest
from triptych.shared.image_info import ImageInfo, PixelLimits
from triptych.shared.instance_info import Emulation, ModelCard

MAX_SAFETENSORS_HEADER_BYTES = 100_000_000  # the format's own limit
NUM_SAMPLED_BYTES = 4096  # chosen: one page per tensor, 3 MB for a model of 700 tensors
MAX_ASPECT_RATIO = 200  # Qwen2-VL's processor refuses more (transformers, image_processing_qwen2_vl.smart_resize)


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """How the model's image processor cuts a picture: sizes in pixels, image_mean and image_std per RGB channel."""

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int
    image_mean: tuple[float, float, float]
    image_std: tuple[float, float, float]

    def __post_init__(self) -> None:
        sizes = (self.patch_size, self.merge_size, self.temporal_patch_size, self.min_pixels, self.max_pixels)
        if min(sizes) < 1:
            raise ValueError("sizes of pictures are at least 1")

    def key(self) -> bytes:
        """What of the options an image's identity depends on (for mm_hash)."""
        return repr(self).encode()

    def within(self, limits: PixelLimits) -> ImageOptions:
        """These options with a client's limits, clamped to the bounds that are here. The upper limit wins over the lower."""
        least, most = (
            bound if wanted is None else min(max(wanted, self.min_pixels), self.max_pixels)
            for bound, wanted in ((self.min_pixels, limits.min_pixels), (self.max_pixels, limits.max_pixels))
        )
        return replace(self, min_pixels=min(least, most), max_pixels=most)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """path: folder with config.json, safetensors, tokenizer. revision: digest of what defines the model's answers, equal
    in all processes that opened the same files. config: config.json as parsed. emulation: when there are no weights."""

    path: Path
    name: str
    revision: str
    config: dict[str, Any]
    image: ImageOptions
    max_position_embeddings: int
    image_token_id: int
    eos_token_ids: tuple[int, ...]
    random_weights: bool
    emulation: Emulation | None = None

    @property
    def model_type(self) -> str:
        return str(self.config["model_type"])

    def card(self, max_model_len: int) -> ModelCard:
        """What a process that takes so long requests tells of the model."""
        return ModelCard(self.name, self.revision, max_model_len, self.random_weights, self.emulation)


def open_checkpoint(model: str, name: str = "") -> Checkpoint:
    """Read the checkpoint at a local folder, or of a hub id (downloaded, or from the local hub cache).

    Raises:
        BadRequest: there is no such checkpoint, or it lacks what is needed.
    """
    if not model:
        raise BadRequest("no model given: set --model or TRIPTYCH_MODEL to a checkpoint folder or hub id")
    path = _locate(model)
    if not (path / "config.json").is_file():
        raise BadRequest(f"{model!r} is no checkpoint: it has no config.json", code="unsupported_model")
    config = _read_json(path / "config.json")
    processor = _image_processor_config(path)
    generation = _read_json(path / "generation_config.json") if (path / "generation_config.json").exists() else {}
    text = config.get("text_config", config)
    try:
        return Checkpoint(
            path=path,
            name=name or _last_part(model),
            revision=_revision(path),
            config=config,
            image=_image_options(processor),
            max_position_embeddings=int(text["max_position_embeddings"]),
            image_token_id=int(config["image_token_id"]),
            eos_token_ids=_ids(generation.get("eos_token_id", text.get("eos_token_id"))),
            random_weights=bool(config.get("triptych_random_weights", False)),
        )
    except KeyError as error:
        raise BadRequest(f"{model}: its configuration has no {error}", code="unsupported_model") from error
    except (TypeError, ValueError, IndexError) as error:
        raise BadRequest(f"{model}: its configuration is not understood ({error})", code="unsupported_model") from error


def resized(height: int, width: int, options: ImageOptions) -> tuple[int, int]:
    """Height and width (pixels) that the model sees a height x width picture at: multiples of patch_size * merge_size,
    area within [min_pixels, max_pixels], ratio kept as well as that allows. The rule is Qwen2-VL's `smart_resize`.

    Raises:
        BadRequest: one side is more than MAX_ASPECT_RATIO times the other.
    """
    factor = options.patch_size * options.merge_size
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise BadRequest(
            f"the image is {width}x{height}: one side is over {MAX_ASPECT_RATIO} times the other", code="invalid_image"
        )
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if new_height * new_width > options.max_pixels:
        scale = math.sqrt(height * width / options.max_pixels)
        new_height = max(factor, math.floor(height / scale / factor) * factor)
        new_width = max(factor, math.floor(width / scale / factor) * factor)
    elif new_height * new_width < options.min_pixels:
        scale = math.sqrt(options.min_pixels / (height * width))
        new_height = math.ceil(height * scale / factor) * factor
        new_width = math.ceil(width * scale / factor) * factor
    return new_height, new_width


def grid_thw(height: int, width: int, options: ImageOptions) -> tuple[int, int, int]:
    """Patch grid (t, h, w) of a resized picture."""
    return 1, height // options.patch_size, width // options.patch_size


def num_image_tokens(grid: tuple[int, int, int], options: ImageOptions) -> int:
    """Vision tokens of a patch grid after the merger."""
    t, h, w = grid
    return t * h * w // options.merge_size**2


def image_info(height: int, width: int, options: ImageOptions, mm_hash: bytes = b"") -> ImageInfo:
    """What preprocess tells of a picture that it has resized to height x width."""
    grid = grid_thw(height, width, options)
    return ImageInfo(mm_hash, height, width, grid, num_image_tokens(grid, options))


def _last_part(model: str) -> str:
    """The default name in the API. A symbolic link keeps its own name: it is the name that the operator chose."""
    if Path(model).is_dir():
        return os.path.basename(os.path.abspath(model)) or model
    return model.rsplit("/", 1)[-1]


def _locate(model: str) -> Path:
    folder = Path(model)
    if folder.is_dir():
        return folder.resolve()
    # deferred: costs 0.3 s of start-up that a local folder does not need
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise BadRequest(
            f"no checkpoint: {model!r} is neither a folder nor a hub id that can be had; {_hub_advice()}",
            code="model_not_found",
        ) from error


def _hub_advice() -> str:
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}:
        return "HF_HUB_OFFLINE is set, so only what the local hub cache holds can be had"
    return "check the path, or the id (OWNER/NAME), the network, and HF_TOKEN if the model is gated"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BadRequest(
            f"cannot read {path.name} of the checkpoint: {type(error).__name__}", code="unsupported_model"
        ) from error
    if not isinstance(loaded, dict):
        raise BadRequest(f"{path.name} of the checkpoint is not an object", code="unsupported_model")
    return loaded


def _image_processor_config(path: Path) -> dict[str, Any]:
    """transformers 5 saves it nested in processor_config.json, and prefers it there; older ones in a file of its own."""
    if (path / "processor_config.json").exists():
        nested = _read_json(path / "processor_config.json").get("image_processor")
        if isinstance(nested, dict):
            return nested
    return _read_json(path / "preprocessor_config.json")


def _image_options(processor: dict[str, Any]) -> ImageOptions:
    size = processor.get("size") or {}
    mean, std = processor["image_mean"], processor["image_std"]
    return ImageOptions(
        patch_size=int(processor["patch_size"]),
        merge_size=int(processor["merge_size"]),
        temporal_patch_size=int(processor["temporal_patch_size"]),
        min_pixels=int(processor.get("min_pixels") or size["shortest_edge"]),
        max_pixels=int(processor.get("max_pixels") or size["longest_edge"]),
        image_mean=(float(mean[0]), float(mean[1]), float(mean[2])),
        image_std=(float(std[0]), float(std[1]), float(std[2])),
    )


def _ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(i) for i in value) if isinstance(value, list) else (int(str(value)),)


def _revision(path: Path) -> str:
    """Digest over the small files and, for each weight file, its size, header, and the first bytes of every tensor: weights
    of one shape that were trained further must not share a revision, and reading gigabytes at each start is too slow."""
    digest = blake3(b"triptych checkpoint v2")
    for file in sorted(path.iterdir()):
        if file.suffix in {".json", ".jinja"}:
            content = file.read_bytes()
            digest.update(f"{file.name}:{len(content)}:".encode() + content)
        elif file.suffix == ".safetensors":
            digest.update(f"{file.name}:{file.stat().st_size}:".encode())
            _update_with_weights(digest, file)
    return digest.hexdigest(16)


def _update_with_weights(digest: blake3, file: Path) -> None:
    """A safetensors file: u64 header length, JSON header {name: {dtype, shape, data_offsets}}, data."""
    with file.open("rb") as opened:
        header_bytes = opened.read(8)
        num_header_bytes = int.from_bytes(header_bytes, "little")
        if len(header_bytes) < 8 or num_header_bytes > MAX_SAFETENSORS_HEADER_BYTES:
            raise BadRequest(f"{file.name} of the checkpoint is not a safetensors file", code="unsupported_model")
        header = opened.read(num_header_bytes)
        digest.update(header_bytes + header)
        try:
            tensors = json.loads(header)
            offsets = sorted(int(tensor["data_offsets"][0]) for name, tensor in tensors.items() if name != "__metadata__")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadRequest(f"{file.name} of the checkpoint has a broken header", code="unsupported_model") from error
        for offset in offsets:
            opened.seek(8 + num_header_bytes + offset)
            digest.update(opened.read(NUM_SAMPLED_BYTES))
