"""Operation counts compared with PyTorch's counter and transformers' masks."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from flatout.engine.families import family_of
from flatout.engine.models.flops import AttentionPairs, ModelFlops, peak_tflops
from flatout.engine.rows.tokens import TokenRows
from tests.engine.families import CONFIGS, step_rows
from tests.engine.plain import auto_class

LAYERS = {"num_hidden_layers": 5}
WIDER_HEADS = {"head_dim": 24}  # with a hidden size of 16 and 2 heads
WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
CASES = {
    "bert": ("bert", "sequence-classification", {}),
    "bert masked": ("bert", "masked-lm", {}),
    "roberta": ("roberta", "masked-lm", {}),
    "distilbert": ("distilbert", "sequence-classification", {}),
    "modernbert, windows": ("modernbert", "masked-lm", LAYERS),
    "modernbert, mean": ("modernbert", "sequence-classification", LAYERS),
    "gpt2, tied": ("gpt2", "causal-lm", {"tie_word_embeddings": True}),
    "llama, grouped": ("llama", "causal-lm", {"tie_word_embeddings": False}),
    "llama, tied": ("llama", "causal-lm", {"tie_word_embeddings": True}),
    "mistral, windows": ("mistral", "causal-lm", {}),
    "qwen2, windows": ("qwen2", "causal-lm", {**LAYERS, **WINDOW}),
    "qwen3, wider heads": ("qwen3", "causal-lm", WIDER_HEADS),
    "qwen3, classes": ("qwen3", "sequence-classification", {**WIDER_HEADS, **WINDOW}),
}


def model_of(family, task, extra):
    config = AutoConfig.for_model(
        family,
        **{**CONFIGS[family], **extra},
        vocab_size=100,
        pad_token_id=0,
        classifier_pooling="mean",
    )
    torch.manual_seed(0)
    return auto_class(task).from_config(config, attn_implementation="eager")


@pytest.mark.parametrize("case", CASES)
def test_products_are_those_that_pytorch_counts(case):
    """Forward and backward pass over one row. Eager attention also computes hidden
    pairs."""
    family, task, extra = CASES[case]
    model, n = model_of(family, task, extra), 24
    with FlopCounterMode(display=False) as counter:
        out = model(torch.arange(5, 5 + n)[None])
        out.logits.square().sum().backward()
    targets = n if out.logits.dim() == 3 else 1
    layers = model.config.num_hidden_layers
    found = ModelFlops.of(model).over(n, targets, layers * n * n)
    assert found == pytest.approx(counter.get_total_flops(), rel=0.01)


@pytest.mark.parametrize("case", CASES)
def test_attention_counts_the_pairs_that_transformers_lets_see(case):
    family, task, extra = CASES[case]
    model, lengths = model_of(family, task, extra).eval(), [1, 2, 9, 24]
    visible = 0
    for length in lengths:
        ids = torch.arange(5, 5 + length)[None]
        seen = model(ids, output_attentions=True).attentions
        visible += sum(int((layer[0, 0] > 0).sum()) for layer in seen)
    pairs = AttentionPairs.of(
        model.config, causal=task == "causal-lm" or family_of(model.config).causal
    )
    assert pairs(np.array(lengths)) == visible


def test_a_document_of_joined_texts_sees_itself_alone():
    columns = {"input_ids": [[7] * 9, [7] * 3], "document_lengths": [[5, 4], [3]]}
    lists = {name: pa.array(v, pa.list_(pa.int32())) for name, v in columns.items()}
    rows = TokenRows(pa.table(lists))
    pairs = AttentionPairs(causal=True, layers_by_reach={None: 1})
    data = replace(
        step_rows("llama", "causal-lm", "packed", rows=rows), count_pairs=pairs
    )
    assert data[0].attention_pairs == 15 + 10 + 6


def test_known_cards_have_their_data_sheets_peak():
    assert peak_tflops("NVIDIA H200") == 989.5
    assert peak_tflops("NVIDIA A100-SXM4-80GB") == 312.0
    assert peak_tflops("NVIDIA L40") == 181.0
    assert peak_tflops("AMD EPYC") is None
