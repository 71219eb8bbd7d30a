"""Build a small model of every model type of transformers for each task, and compare
packed and padded rows with single rows in transformers."""

import signal
import sys
from collections import Counter
from typing import Any

import numpy as np
import torch
import transformers
from transformers.models.auto import modeling_auto

from flatout.engine.families import family_of
from flatout.engine.models.building import ModelError, build
from flatout.engine.models.model import TaskModel
from flatout.engine.models.row_faults import check_padding
from flatout.engine.ops import attention
from flatout.engine.parameters import ModelSettings, SettingsError
from tests.engine.families import (
    MAX_LENGTH,
    VOCABULARY,
    collator_of,
    no_dropout,
    task_of,
    token_rows,
)

MAPPINGS = {
    "sequence-classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "token-classification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
}
SMALL = {
    32: "hidden_size d_model d_latents n_embd dim embed_dim embedding_size emb_dim",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers "
    "num_encoder_layers num_decoder_layers num_key_value_heads n_head_kv "
    "num_hidden_groups num_experts_per_tok num_self_attends_per_block",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads "
    "decoder_attention_heads num_experts num_local_experts n_routed_experts",
    64: "intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim n_inner "
    "hidden_dim d_inner moe_intermediate_size shared_expert_intermediate_size "
    "max_position_embeddings n_positions max_seq_len block_size num_latents",
    8: "head_dim d_kv d_head kv_lora_rank q_lora_rank qk_nope_head_dim v_head_dim "
    "qk_rope_head_dim attention_head_size rotary_dim",
    100: "vocab_size",
}
SMALLER = {name: size for size, names in SMALL.items() for name in names.split()}
TOLERANCE = 2e-3
SECONDS_A_TYPE = 60


def types_of(task: str) -> list[str]:
    return list(getattr(modeling_auto, MAPPINGS[task]))


def small_config(kind: str) -> dict[str, Any]:
    """Return a small config of a type. Raises any error of the library if this is
    impossible."""
    default = transformers.CONFIG_MAPPING[kind]()
    if getattr(default, "sub_configs", None):
        raise NotImplementedError("several models in one")
    sizes = {name: n for name, n in SMALLER.items() if _takes(default, name)}
    if "kv_lora_rank" in sizes:
        sizes |= {"num_key_value_heads": 4, "num_attention_heads": 4}
    return {"model_type": kind, **sizes, "pad_token_id": 0}


def _takes(config: Any, name: str) -> bool:
    fixed = isinstance(getattr(type(config), name, None), property)
    return hasattr(config, name) and not fixed


class TooSlow(BaseException):
    """Raised for models that need kernels of their own. `except Exception` does not
    catch it."""


def _too_slow(*_: Any) -> None:
    raise TooSlow


def plain(model, task, rows, *, pools_last):
    """Return the logits at the targets, computed row by row."""
    numbers = np.arange(len(rows))
    targets = task.targets(rows, numbers, 0, pools_last=pools_last)
    values, found = targets.values or rows.views(numbers), []
    with torch.no_grad():
        for ids, places in zip(values, targets.places, strict=True):
            row = torch.tensor([ids.tolist()])
            logits = model(input_ids=row, attention_mask=torch.ones_like(row)).logits
            found.append(
                logits
                if task.head_kind.one_a_row
                else logits[0][torch.tensor(places.tolist())]
            )
    return torch.cat(found)


def ours(model, name, rows, *, packed):
    if packed:
        attention.register()
        model.set_attn_implementation(attention.PACKED)
    made = TaskModel(model, task_of(name), MAX_LENGTH).eval()
    collator = collator_of(
        name, packed=packed, pools_last=made.family.causal, max_length=MAX_LENGTH
    )
    micro = collator.collate(rows, np.arange(len(rows)), 0)
    with torch.no_grad():
        return made.logits(micro)[: len(micro["target_index"])]


def tried(kind: str, name: str) -> str:
    """Return `equal`, `refused: ...`, `not small: ...`, or a description of the
    error."""
    task, rows = task_of(name), token_rows(name, 8)
    try:
        config = small_config(kind)
        settings = ModelSettings(task=name, config=config)
    except Exception as error:  # from any of a hundred libraries
        return f"not small: {error}"
    torch.manual_seed(0)
    try:
        model = no_dropout(build(settings, task, VOCABULARY, MAX_LENGTH)).eval()
        (row,) = rows.views(np.array([0]))
        with torch.no_grad():
            model(input_ids=torch.tensor([row.tolist()]))
    except (ModelError, SettingsError) as error:
        return f"not small: {error}"
    except Exception as error:
        return f"not small: {type(error).__name__}: {error}"
    for parameter in model.parameters():  # outputs that differ from row to row
        parameter.data *= 3 if parameter.dim() > 1 else 1
    try:
        check_padding(model, task)
    except ModelError as error:
        return f"refused: {error}"
    family = family_of(model.config)
    expected = plain(model, task, rows, pools_last=family.causal)
    scale, told = expected.abs().max().item(), []
    for packed in (False, *[True] * bool(family.packs)):
        error = (ours(model, name, rows, packed=packed) - expected).abs().max().item()
        if not error <= TOLERANCE * scale:
            told.append(
                f"{'packed' if packed else 'padded'} differs by {error / scale}"
            )
    return "; ".join(told) or ("equal, packed" if family.packs else "equal")


def sweep(task: str) -> dict[str, str]:
    found = {}
    signal.signal(signal.SIGALRM, _too_slow)
    for kind in types_of(task):
        try:
            signal.alarm(SECONDS_A_TYPE)
            found[kind] = tried(kind, task)
            signal.alarm(0)
        except TooSlow:
            found[kind] = "not small: too slow without kernels of its own"
        except Exception as error:
            found[kind] = f"raised {type(error).__name__}: {error}"
        sys.stdout.write(f"{task} {kind}: {found[kind][:150]}\n")
        sys.stdout.flush()
    return found


if __name__ == "__main__":
    for asked in sys.argv[1:] or MAPPINGS:
        counts = Counter(told.partition(":")[0] for told in sweep(asked).values())
        sys.stdout.write(f"{asked}: {dict(counts)}\n")
