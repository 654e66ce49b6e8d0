"""From pixels to what a Qwen2-VL style vision tower takes: normalised patches.

The arithmetic is that of transformers' Qwen2VLImageProcessorPil, step by step in the same precision, on any device.
Shapes: C channels, H and W pixels, P patches, M merge_size, T temporal_patch_size, S patch_size.
"""

from __future__ import annotations

import torch

from triptych.shared.checkpoint import ImageOptions
from triptych.shared.errors import InternalError
from triptych.shared.image_info import ImageInfo

_RESCALE = 1 / 255  # the processor's rescale_factor


def patchify(pixels_HWC: torch.Tensor, options: ImageOptions) -> torch.Tensor:
    """Normalise a picture and cut it into patches.

    Args:
        pixels_HWC: uint8 [height, width, 3], already resized: both sides are multiples of patch_size * merge_size.
        options: the checkpoint's.

    Returns:
        float32 [P, C * T * S * S] on the same device, patches of one merge window next to each other.
    """
    height, width, num_channels = pixels_HWC.shape
    mean_C = torch.tensor(options.image_mean, dtype=torch.float32, device=pixels_HWC.device)
    std_C = torch.tensor(options.image_std, dtype=torch.float32, device=pixels_HWC.device)
    # float64 for the scale only, as the processor does it: then both round to the same float32
    scaled_HWC = (pixels_HWC.to(torch.float64) * _RESCALE).to(torch.float32)
    image_CHW = scaled_HWC.sub_(mean_C).div_(std_C).permute(2, 0, 1)
    size, merge = options.patch_size, options.merge_size
    grid_h, grid_w = height // size, width // size
    cut = image_CHW.reshape(num_channels, grid_h // merge, merge, size, grid_w // merge, merge, size)
    patches = cut.permute(1, 4, 2, 5, 0, 3, 6).unsqueeze(5)  # [H/MS, W/MS, M, M, C, 1, S, S]: a still has one frame, repeated
    patches = patches.expand(-1, -1, -1, -1, -1, options.temporal_patch_size, -1, -1)
    return patches.reshape(grid_h * grid_w, -1)


def check_image(image: ImageInfo, pixels: torch.Tensor, options: ImageOptions) -> None:
    """Refuse an image whose description and pixels don't belong together, before it can upset a whole batch.

    Raises:
        InternalError: they disagree.
    """
    factor = options.patch_size * options.merge_size
    grid = (1, image.height // options.patch_size, image.width // options.patch_size)
    if pixels.dtype != torch.uint8 or tuple(pixels.shape) != (image.height, image.width, 3):
        raise InternalError(f"pixels are {pixels.dtype} {tuple(pixels.shape)}, not uint8 {(image.height, image.width, 3)}")
    if image.height % factor or image.width % factor or min(image.height, image.width) < factor:
        raise InternalError(f"an image of {image.width}x{image.height} pixels is not cut in windows of {factor}")
    if image.grid_thw != grid or image.num_tokens != grid[1] * grid[2] // options.merge_size**2:
        raise InternalError(f"an image's grid {image.grid_thw} or {image.num_tokens} tokens don't fit its size")
