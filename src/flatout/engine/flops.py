"""Floating-point operations of a training step, and what devices can do.

Model FLOPs as in PaLM (Chowdhery et al. 2022, appendix B): 6 a weight and token for
forward and backward, plus 12 x layers x width x length a token for attention; here
with the true length of each row, no padding, and the head on targets alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flatout.engine.runtime import Runtime
from flatout.engine.timing import Window

PEAK_BF16_TFLOPS = {
    "H200": 989.5,
    "H100 PCIe": 756.0,
    "H100": 989.5,
    "B200": 2250.0,
    "A100": 312.0,
    "A10": 125.0,
    "L40S": 362.0,
    "L4": 121.0,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
    "V100": 125.0,
    "T4": 65.0,
}
"""Dense bf16 (fp16 where the card has no bf16), from NVIDIA's data sheets."""


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of forward and backward."""

    body_parameters: int
    """Weights that every token passes: no embeddings, no head."""
    head_parameters: int
    """Weights that every target passes."""
    layers: int
    width: int

    @classmethod
    def of(cls, model: Any, narrowed: bool = False) -> ModelFlops:
        """`narrowed`: what is behind the last attention is computed for targets only,
        and is counted so: work that is not done is no throughput."""
        config = model.config
        embedding_ids = {
            id(parameter)
            for name, module in model.base_model.named_modules()
            if "embedding" in name.lower() or name in {"wte", "wpe"}
            for parameter in module.parameters(recurse=False)
        }
        base_ids = {id(p) for p in model.base_model.parameters()}
        body = [p for p in model.base_model.parameters() if id(p) not in embedding_ids]
        head = [p for p in model.parameters() if id(p) not in base_ids]
        late = _behind_last_attention(model) if narrowed else 0
        output = model.get_output_embeddings()
        tied = output is not None and id(output.weight) in base_ids
        return cls(
            body_parameters=sum(p.numel() for p in body) - late,
            head_parameters=sum(p.numel() for p in head)
            + late
            + (output.weight.numel() if tied else 0),
            layers=config.num_hidden_layers,
            width=config.hidden_size,
        )

    def of_window(self, window: Window) -> float:
        dense = 6 * self.body_parameters * window.tokens
        head = 6 * self.head_parameters * window.targets
        attention = 12 * self.layers * self.width * window.squared_lengths
        return float(dense + head + attention)


HOST_S_PER_BLOCK = 2.2e-3
"""What launching a compiled block takes the host, forward and backward: 25 to 33 ms
for the 12 of BERT-base."""
USED_SHARE = 0.5
"""Of a data sheet's peak, in a good step."""


def launch_tokens(width: int, runtime: Runtime) -> int:
    """Tokens that a GPU trains in the time in which the host launches a micro-batch; 0
    on a CPU and where the GPU's peak is not known, as in fp32, where the host is seldom
    the bound. A block of `width` has 12 x width^2 weights, so the number of blocks does
    not matter."""
    peak = peak_tflops(runtime.device_name) if runtime.is_cuda else None
    if peak is None or runtime.precision == "fp32":
        return 0
    token_s = 6 * 12 * width**2 / (USED_SHARE * peak * 1e12)
    return int(HOST_S_PER_BLOCK / token_s)


def _behind_last_attention(model: Any) -> int:
    """Weights of the last layer behind its attention (see narrowing.py)."""
    layer = model.base_model.encoder.layer[-1]
    attended = sum(p.numel() for p in layer.attention.self.parameters())
    return int(sum(p.numel() for p in layer.parameters()) - attended)


def peak_tflops(device_name: str) -> float | None:
    """Data-sheet peak of a device; None for one that is not in the table."""
    for name, peak in PEAK_BF16_TFLOPS.items():
        if name in device_name:
            return peak
    return None
