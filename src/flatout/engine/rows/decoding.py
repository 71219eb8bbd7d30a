"""Image files as pixels: turned upright, in one mode and size, or why not."""

from __future__ import annotations

import io
import threading
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
    _counting: threading.Lock = field(default_factory=threading.Lock, repr=False)

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
        except Exception as error:  # Pillow's readers raise whatever bytes make of them
            raise BadImage(f"truncated or broken: {error}") from error

    def _pixels(self, image: Image.Image) -> npt.NDArray[np.uint8]:
        with self._timed("decode"):
            if getattr(image, "n_frames", 1) > 1:
                self._convert("animated: its first frame")
            image.load()
        with self._timed("convert"):
            if image.getexif().get(0x0112, 1) != 1:
                self._convert("turned by its EXIF")
                image = ImageOps.exif_transpose(image)
            plain = self._plain(image)
        with self._timed("resize"):
            size = (self.size, self.size)
            fitted = ImageOps.fit(plain, size, Image.Resampling.BILINEAR)
        with self._counting:
            self.decoded += 1
        pixels = np.asarray(fitted, dtype=np.uint8)
        return pixels.reshape(self.size, self.size, self.channels)

    def _plain(self, image: Image.Image) -> Image.Image:
        """Grey, or red, green and blue, of 8 bits."""
        if image.mode.startswith(("I", "F")):
            image = _to_8_bits(image)
            self._convert("16 bits, scaled to 8")
        elif image.mode not in ("L", "RGB"):
            self._convert(image.mode)
            image.info.pop("transparency", None)  # left out, which Pillow warns of
        mode = "L" if self.channels == 1 else "RGB"
        return image if image.mode == mode else image.convert(mode)

    @contextmanager
    def _timed(self, transform: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        elapsed_s = time.perf_counter() - start
        with self._counting:
            self.seconds[transform] += elapsed_s

    def _convert(self, kind: str) -> None:
        with self._counting:
            self.converted[kind] += 1

    def told(self) -> dict[str, Any]:
        """Conversions, and transforms that are slow on average, in ms an image."""
        each = {n: s / max(1, self.decoded) for n, s in self.seconds.items()}
        slow = {name: round(1e3 * s, 1) for name, s in each.items() if s > SLOW_S}
        return {"converted": dict(self.converted), "slow_transforms_ms": slow}


def _to_8_bits(image: Image.Image) -> Image.Image:
    """Of 16 bits, which Pillow holds in 32 where a PGM has them. Raises BadImage where
    nothing says which value is white."""
    from_32 = image.mode == "I" and image.format in ("PNG", "PPM")
    of_16 = image.mode.startswith("I;16") or from_32
    if not of_16:
        kind = "fractions" if image.mode == "F" else "whole numbers of 32 bits"
        raise BadImage(f"{kind} of no known range: save it with 8 or 16 bits")
    values = np.asarray(image, dtype=np.float64) / 257
    return Image.fromarray(values.round().astype(np.uint8))
