"""Decode image files to upright pixel arrays of a given size, in grey or RGB."""

from __future__ import annotations

import io
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

MOST_PIXELS = 2**28
"""Images with more pixels are rejected, as small files can decode to huge images."""
Image.MAX_IMAGE_PIXELS = MOST_PIXELS
TOO_LARGE = "more pixels than an image should have"
SMALL = 32
"""A warning is logged if much larger images are scaled to a smaller size than this."""
SLOW_S = 0.01
"""The average time in seconds above which a transform is reported as slow."""


class BadImage(ValueError):
    """Raised if an image file cannot be decoded. The message contains the reason."""


@dataclass
class Decoder:
    """Decodes images to uint8 arrays (size, size, channels) with timed transforms."""

    size: int
    channels: int
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    decoded: int = 0
    first: tuple[int, int, str] | None = None
    """Width, height and mode of the first decoded image."""
    _counting: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __call__(self, file: Path | io.BytesIO) -> npt.NDArray[np.uint8]:
        """Decode a file or its contents. Raises BadImage if it cannot be decoded."""
        try:
            with Image.open(file) as image:
                # Up to twice this size, Pillow only warns. Turning the warning into an
                # error is not thread-safe, because warning filters are global.
                if image.width * image.height > MOST_PIXELS:
                    raise BadImage(TOO_LARGE)
                return self._pixels(image)
        except BadImage:
            raise
        except FileNotFoundError as error:
            raise BadImage("no such file") from error
        except UnidentifiedImageError as error:
            raise BadImage("not an image of a known kind") from error
        except Image.DecompressionBombError as error:
            raise BadImage(TOO_LARGE) from error
        except Exception as error:  # Pillow's readers may raise any exception
            reason = str(error).partition(" (")[0]  # without the number of bytes
            raise BadImage(f"truncated or broken: {reason}") from error

    def _pixels(self, image: Image.Image) -> npt.NDArray[np.uint8]:
        with self._timed("decode"):
            image.load()  # only the first frame of an animation
        with self._timed("convert"):
            ImageOps.exif_transpose(image, in_place=True)
            self.first = self.first or (image.width, image.height, image.mode)
            plain = self._plain(image)
        with self._timed("resize"):
            size = (self.size, self.size)
            fitted = ImageOps.fit(plain, size, Image.Resampling.BILINEAR)
        with self._counting:
            self.decoded += 1
        pixels = np.asarray(fitted, dtype=np.uint8)
        return pixels.reshape(self.size, self.size, self.channels)

    def _plain(self, image: Image.Image) -> Image.Image:
        """Convert an image to 8-bit grey or RGB."""
        if image.mode.startswith(("I", "F")):
            image = _to_8_bits(image)
        elif image.mode not in ("L", "RGB"):
            image.info.pop("transparency", None)  # avoids a Pillow warning
        mode = "L" if self.channels == 1 else "RGB"
        return image if image.mode == mode else image.convert(mode)

    def lost_detail(self) -> str | None:
        """Return a warning if the first image loses its colours or most pixels."""
        width, height, mode = self.first or (0, 0, "L")
        is_grey = mode in ("1", "L", "LA") or mode.startswith(("I", "F"))
        is_smaller = self.size < SMALL and min(width, height) >= 2 * self.size
        if (is_grey or self.channels > 1) and not is_smaller:
            return None
        kept = "grey" if self.channels == 1 else "colour"
        return (
            f"the first file has {width} x {height} pixels ({mode}), and "
            f"images.size={self.size}, images.channels={self.channels} keep "
            f"{self.size} x {self.size} in {kept}: set both to keep more"
        )

    @contextmanager
    def _timed(self, transform: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        elapsed_s = time.perf_counter() - start
        with self._counting:
            self.seconds[transform] += elapsed_s

    @property
    def slow_transforms_ms(self) -> dict[str, float]:
        """The average milliseconds per image of each slow transform, by name."""
        each = {n: s / max(1, self.decoded) for n, s in self.seconds.items()}
        return {name: round(1e3 * s, 1) for name, s in each.items() if s > SLOW_S}


def _to_8_bits(image: Image.Image) -> Image.Image:
    """Convert an image with 16-bit values (which Pillow may store in 32 bits) to 8 bits
    per value. Raises BadImage if the range of the values is unknown."""
    from_32 = image.mode == "I" and image.format in ("PNG", "PPM")
    of_16 = image.mode.startswith("I;16") or from_32
    if not of_16:
        kind = "fractions" if image.mode == "F" else "whole numbers of 32 bits"
        raise BadImage(f"{kind} of no known range: save it with 8 or 16 bits")
    values = np.asarray(image, dtype=np.float64) / 257
    return Image.fromarray(values.round().astype(np.uint8))
