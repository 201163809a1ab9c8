"""Reads images from files and data URIs; limits are checked before an image is decoded."""

from __future__ import annotations

import base64
import binascii
import io
from pathlib import Path
from typing import Any

from bmforge.errors import DataError, MissingDependencyError

__all__ = ["MAX_IMAGE_PIXELS", "check_image", "read_data_uri", "read_image", "read_image_file"]

MAX_IMAGE_PIXELS = 1 << 25
# Formats that every browser can show, and two that cameras and scanners write. Pillow has decoders
# of many rare formats, which an untrusted file should not reach.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "PPM")
# Last bytes of a complete file; other formats are decoded to find out whether a file is complete.
_ENDS = {"PNG": b"IEND\xaeB`\x82", "JPEG": b"\xff\xd9", "GIF": b";"}


def read_image(data: bytes, name: str, max_pixels: int = MAX_IMAGE_PIXELS) -> Any:
    """Decode an image into an RGB Pillow image, rotated as its EXIF data specifies.

    Args:
        data: contents of an image file.
        name: name of the image, for error messages.
        max_pixels: maximum number of pixels; a file of a few kB can have billions.

    Raises:
        DataError: the data is not an image of a supported format, or has too many pixels.
        MissingDependencyError: Pillow is not installed.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise MissingDependencyError("Pillow", "images", "reading images") from error
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:  # reads the header only
            width, height = image.size
            if width * height <= max_pixels:
                return ImageOps.exif_transpose(image).convert("RGB")
    except Image.DecompressionBombError as error:
        raise DataError(
            f"{name} has too many pixels (allowed: {max_pixels:,}). Use a smaller image."
        ) from error
    except (OSError, ValueError, SyntaxError, EOFError) as error:  # all raised by Pillow's decoders
        raise DataError(
            f"{name} cannot be read as an image (supported: {', '.join(_FORMATS)}). Convert it, or "
            "check that the file is complete."
        ) from error
    raise DataError(
        f"{name} has {width} x {height} pixels (allowed: {max_pixels:,} in total). Send a smaller "
        "image."
    )


def read_image_file(path: str | Path) -> Any:
    """Decode an image file; see `read_image`."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise DataError(
            f"cannot read the image {str(path)!r} ({error}). Check the path."
        ) from error
    return read_image(data, f"the image {str(path)!r}")


def check_image(name: str) -> None:
    """Check that a file or data URI is a complete image, without decoding most images.

    Args:
        name: path of a file, or data URI.

    Raises:
        DataError: the image is damaged, truncated, too large, or in an unsupported format.
        MissingDependencyError: Pillow is not installed.
    """
    if name.startswith("data:"):
        read_data_uri(name, "the image")
    elif not _looks_complete(Path(name)):
        read_image_file(name)


def _looks_complete(file: Path) -> bool:
    """Return True if the header of a file is that of an image, and its last bytes are the end."""
    try:
        from PIL import Image
    except ImportError:
        return False
    try:
        with file.open("rb") as stream:
            with Image.open(stream, formats=_FORMATS) as image:  # reads the header only
                end, pixels = _ENDS.get(str(image.format)), image.width * image.height
            if end is None or pixels > MAX_IMAGE_PIXELS:
                return False
            stream.seek(-len(end), 2)
            return stream.read() == end
    except (Image.DecompressionBombError, OSError, ValueError, SyntaxError):
        return False


def read_data_uri(uri: str, name: str, max_pixels: int = MAX_IMAGE_PIXELS) -> Any:
    """Decode an image in a data URI, such as ``data:image/png;base64,...``.

    Args:
        uri: data URI; URIs of other schemes are not fetched.
        name: name of the image, for error messages.
        max_pixels: maximum number of pixels.

    Raises:
        DataError: the URI has another form, or its data is not a supported image.
    """
    head, _, body = uri.partition(",")
    if not (head.startswith("data:image/") and head.endswith(";base64")):
        raise DataError(
            f"{name} is not a data URI of an image (needed: data:image/png;base64,...). Send "
            "the image as a data URI; other URLs are not fetched."
        )
    try:
        data = base64.b64decode(body, validate=True)
    except binascii.Error as error:
        raise DataError(
            f"{name} is not valid base64 ({error}). Encode the bytes of the file as base64."
        ) from error
    return read_image(data, name, max_pixels)
