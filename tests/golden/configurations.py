"""Small training runs of the golden record, given by differences from the first one."""

from typing import Any

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
ENCODER = {**SIZES, "intermediate_size": 32, "initializer_range": 0.2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BERT = {"model_type": "bert", **ENCODER, **NO_DROPOUT}
ROBERTA = {**BERT, "model_type": "roberta"}
DISTILBERT = {
    "model_type": "distilbert",
    "dim": 16,
    "n_layers": 2,
    "n_heads": 2,
    "hidden_dim": 32,
    "initializer_range": 0.2,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "seq_classif_dropout": 0.0,
}
MODERNBERT = {"model_type": "modernbert", **ENCODER, "local_attention": 8}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "initializer_range": 0.2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
LLAMA = {"model_type": "llama", **ENCODER, "num_key_value_heads": 1}
MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 6, "head_dim": 8}
QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 8}
KEYS = {"model_type": "log_key_lstm", "hidden_size": 16}
BILM = {
    "model_type": "bilm",
    "embedding_size": 12,
    "hidden_size": 16,
    "dropout": 0.0,
}
VIT = {"model_type": "vit", "patch_size": 4, **ENCODER}
CONVNEXT = {
    "model_type": "convnext",
    "patch_size": 2,
    "num_stages": 2,
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
}
RESNET = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
    "layer_type": "basic",
}
MLP = {"model_type": "residual_mlp", "num_hidden_layers": 2, "hidden_size": 8}

CLASSES, TAGS = "sequence-classification", "token-classification"
SEVERAL, CAUSAL = "multi-label-classification", "causal-lm"
IMAGES = "image-classification"
TWO = {"ranks": 2}


def of(config: dict[str, Any] = BERT, task: str = CLASSES, **train: Any) -> Any:
    """Return a configuration for `task`. The keys `ranks`, `rows`, `model`, `runtime`,
    `killed_before` (a step), `then` (settings after the kill) and `words` (in an error
    message) are not settings of `train`."""
    return {"config": config, "task": task, **train}


TRAININGS: dict[str, dict[str, Any]] = {
    # tasks and families
    "classes": of(),
    "classes, another seed": of(runtime={"seed": 7}),
    "pairs of texts": of(rows="pairs"),
    "regression": of(ROBERTA, "regression"),
    "several labels": of(DISTILBERT, SEVERAL),
    "tags": of(MODERNBERT, TAGS),
    "masked words": of(BERT, "masked-lm"),
    "masked words, padded": of(BERT, "masked-lm", batching="grouped"),
    "next words": of(LLAMA, CAUSAL),
    "next words, window": of(MISTRAL, CAUSAL),
    "completions": of(LLAMA, CAUSAL, rows="completions"),
    "joined texts": of(QWEN3, CAUSAL, rows="joined"),
    "classes of a decoder": of(GPT2),
    "classes, mean of states": of({**MODERNBERT, "classifier_pooling": "mean"}),
    "next keys": of(KEYS, "next-key"),
    "next keys, window": of({**KEYS, "window_keys": 5}, "next-key"),
    "both directions": of(BILM, "bidirectional-lm"),
    "both directions, tied": of(
        {**BILM, "projection_size": 12, "residual": True, "tie_word_embeddings": True},
        "bidirectional-lm",
    ),
    "images, vit": of(VIT, IMAGES, rows="images"),
    "images, convnext, crops": of(
        CONVNEXT, IMAGES, rows="images", model={"crop_area": 0.5}
    ),
    "images, resnet": of(
        RESNET, IMAGES, rows="images", token_budget="auto", learning_rate=1e-3
    ),
    "arrays": of(MLP, rows="arrays"),
    "arrays, regression": of(MLP, "regression", rows="arrays"),
    # batching
    "fixed": of(batching="fixed"),
    "random": of(batching="random"),
    "grouped": of(batching="grouped"),
    "packed": of(batching="packed"),
    "one micro-batch": of(token_budget=4096),
    "next words, grouped": of(LLAMA, CAUSAL, batching="grouped"),
    "joined texts, grouped": of(QWEN3, CAUSAL, rows="joined", batching="grouped"),
    "tags, random": of(MODERNBERT, TAGS, batching="random"),
    "workers": of(loader={"num_workers": 2}),
    # optimizers and schedules
    "sgd": of(optimizer="sgd", learning_rate=0.1),
    "adafactor": of(optimizer="adafactor"),
    "unfused": of(fused_optimizer=False, adam_beta1=0.8, adam_beta2=0.95),
    "cosine": of(schedule="cosine", min_learning_rate_share=0.1, warmup_fraction=0.3),
    "constant": of(schedule="constant", max_grad_norm=None, weight_decay=0.5),
    "wsd": of(schedule="wsd", decay_fraction=0.5, learning_rate_at_batch=64),
    "frozen": of(freeze=["embeddings", "encoder.layer.[0-0]"]),
    "checkpointed layers": of(gradient_checkpointing=True),
    # losses
    "smoothed": of(label_smoothing=0.2),
    "balanced": of(class_weights="balanced"),
    "weighted and smoothed": of(class_weights={"a": 0.5, "c": 3}, label_smoothing=0.1),
    "focal": of(focal_gamma=2.0, class_weights=[0.5, 3, 1]),
    "smoothed next words": of(LLAMA, CAUSAL, label_smoothing=0.1),
    "weighted tags": of(MODERNBERT, TAGS, class_weights=[0.5, 3, 1]),
    # evaluations, windows, kills
    "windows of 3": of(max_steps=9, log_every=3, evaluate_every=4, metrics_every=1),
    "early stopping": of(
        max_steps=24,
        epochs=6,
        learning_rate=3e-2,
        schedule="constant",
        evaluate_every=2,
        metric="f1_macro",
        early_stopping_patience=2,
    ),
    "part of an epoch": of(max_steps=None, epochs=1.4),
    "killed": of(
        {**BERT, "hidden_dropout_prob": 0.1},
        max_steps=8,
        killed_before=5,
        checkpoint={"every_steps": 2},
    ),
    "killed, then cut otherwise": of(
        max_steps=8,
        killed_before=5,
        checkpoint={"every_steps": 2},
        then={"batching": "grouped", "token_budget": 200},
    ),
    "killed next words": of(
        LLAMA, CAUSAL, max_steps=6, killed_before=3, checkpoint={"every_steps": 2}
    ),
    # two ranks
    "two ranks": of(**TWO),
    "two ranks, grouped": of(batching="grouped", **TWO),
    "two ranks, one bucket": of(distributed={"bucket_mib": "all"}, **TWO),
    "two ranks, next words": of(LLAMA, CAUSAL, **TWO),
    "two ranks, weighted": of(class_weights="balanced", focal_gamma=1.0, **TWO),
    "two ranks, images": of(VIT, IMAGES, rows="images", **TWO),
    "two ranks, arrays": of(MLP, rows="arrays", **TWO),
    # refused, or failed
    "unknown parameter": of(learning_rat=1, words=["train", "learning_rate"]),
    "option of another task": of(
        LLAMA, CAUSAL, class_weights="balanced", words=["train.class_weights", CAUSAL]
    ),
    "freezes nothing": of(freeze=["embedings"], words=["embedings", "embeddings"]),
    "budget below a row": of(token_budget=10, words=["token_budget", "24"]),
    "no such class": of(class_weights={"z": 1}, words=["'z'", "class"]),
    "no such checkpoint": of(resume="nowhere", words=["nowhere"]),
    "batch norm in parts": of(
        RESNET, IMAGES, rows="images", token_budget=5, words=["16"]
    ),
    "not finite": of(
        learning_rate=1e30, max_grad_norm=None, max_steps=9, words=["step"]
    ),
}
