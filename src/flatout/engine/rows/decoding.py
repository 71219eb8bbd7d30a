"""Image files as pixels: turned upright, in one mode and size, or why not."""

from __future__ import annotations

import io
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

MOST_PIXELS = 2**28
"""A larger one is refused: a small file may hold more pixels than memory does."""
Image.MAX_IMAGE_PIXELS = MOST_PIXELS
TOO_LARGE = "more pixels than an image should have"
SLOW_S = 0.01
"""A transform that takes longer on average is named in the report."""


class BadImage(ValueError):
    """A file that gives no pixels; says why."""


@dataclass
class Decoder:
    """Decodes to (size, size, channels) uint8, and keeps count."""

    size: int
    channels: int
    converted: Counter[str] = field(default_factory=Counter)
    """What was another before: images by kind."""
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    decoded: int = 0

    def __call__(self, path: Path) -> npt.NDArray[np.uint8]:
        """Raises BadImage."""
        if not path.is_file():
            raise BadImage("no such file")
        if not path.stat().st_size:
            raise BadImage("an empty file")
        return self._opened(path)

    def of_bytes(self, data: Any) -> npt.NDArray[np.uint8]:
        """Of what a file holds. Raises BadImage."""
        return self._opened(io.BytesIO(data))

    def _opened(self, file: Path | io.BytesIO) -> npt.NDArray[np.uint8]:
        try:
            with Image.open(file) as image:
                # Pillow only warns of up to twice as many; its filters are the whole
                # process's, and threads decode here.
                if image.width * image.height > MOST_PIXELS:
                    raise BadImage(TOO_LARGE)
                return self._pixels(image)
        except BadImage:
            raise
        except UnidentifiedImageError as error:
            raise BadImage("no image of a known kind") from error
        except Image.DecompressionBombError as error:
            raise BadImage(TOO_LARGE) from error
        except (OSError, SyntaxError, ValueError, EOFError) as error:
            raise BadImage(f"truncated or broken: {error}") from error

    def _pixels(self, image: Image.Image) -> npt.NDArray[np.uint8]:
        with self._timed("decode"):
            if getattr(image, "n_frames", 1) > 1:
                self.converted["animated: its first frame"] += 1
            image.load()
        with self._timed("convert"):
            if image.getexif().get(0x0112, 1) != 1:
                self.converted["turned by its EXIF"] += 1
                image = ImageOps.exif_transpose(image)
            plain = self._plain(image)
        with self._timed("resize"):
            size = (self.size, self.size)
            fitted = ImageOps.fit(plain, size, Image.Resampling.BILINEAR)
        self.decoded += 1
        pixels = np.asarray(fitted, dtype=np.uint8)
        return pixels.reshape(self.size, self.size, self.channels)

    def _plain(self, image: Image.Image) -> Image.Image:
        """Grey, or red, green and blue, of 8 bits."""
        if image.mode.startswith(("I", "F")):
            self.converted[f"{image.mode}: scaled to 8 bits"] += 1
            image = _to_8_bits(image)
        elif image.mode not in ("L", "RGB"):
            self.converted[image.mode] += 1
        mode = "L" if self.channels == 1 else "RGB"
        return image if image.mode == mode else image.convert(mode)

    @contextmanager
    def _timed(self, transform: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[transform] += time.perf_counter() - start

    def told(self) -> dict[str, Any]:
        """Conversions, and transforms that are slow on average, in ms an image."""
        each = {n: s / max(1, self.decoded) for n, s in self.seconds.items()}
        slow = {name: round(1e3 * s, 1) for name, s in each.items() if s > SLOW_S}
        return {"converted": dict(self.converted), "slow_transforms_ms": slow}


def _to_8_bits(image: Image.Image) -> Image.Image:
    """16 bits by their upper half; 32 bits and fractions by their own range."""
    values = np.asarray(image, dtype=np.float64)
    if image.mode.startswith("I;16") or values.max(initial=0) > 255:
        values = values / 257
    return Image.fromarray(values.clip(0, 255).round().astype(np.uint8))
